//! Finding the library and its functions.

// Opens a library and takes addresses from it.
#![allow(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use crate::functions::Functions;

/// The environment variable that names the library's file.
pub const LIBRARY_VARIABLE: &str = "MOONCAKE_LIBRARY";

/// What the library is called where the variable is not set; the system's loader looks for it.
pub const USUAL_NAMES: &[&str] = if cfg!(target_vendor = "apple") {
    &["libtransfer_engine.dylib", "libtransfer_engine.so"]
} else {
    &["libtransfer_engine.so"]
};

/// Why a library could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no such file: set `MOONCAKE_LIBRARY` to the path of the library.
    #[error("there is no {}; set {LIBRARY_VARIABLE} to the path of Mooncake's library", file.display())]
    Missing {
        /// The file, or the name that the system's loader looked for in vain.
        file: PathBuf,
    },
    /// The file is there and the system's loader refused it: it is no shared library, or none for this
    /// machine, or one that it needs itself is missing.
    #[error("{} cannot be loaded: {reason}", file.display())]
    NotALibrary {
        /// The file.
        file: PathBuf,
        /// What the system's loader says.
        reason: String,
    },
    /// The library lacks a function that every version since 0.3.0 has: it is another library, or too
    /// old.
    #[error("{} has no function {symbol}", file.display())]
    MissingSymbol {
        /// The file.
        file: PathBuf,
        /// The function.
        symbol: &'static str,
    },
}

/// A loaded library. It stays loaded until the process ends.
#[derive(Clone, Debug)]
pub struct Library {
    file: PathBuf,
    functions: Functions,
}

impl Library {
    /// Loads the file that the environment variable `MOONCAKE_LIBRARY` names, or else the library under
    /// its usual name.
    ///
    /// # Errors
    /// [`LoadError`].
    ///
    /// # Safety
    /// As [`open`](Library::open), for whichever file is found.
    pub unsafe fn load() -> Result<Self, LoadError> {
        let mut error = None;
        for name in candidates(std::env::var_os(LIBRARY_VARIABLE)) {
            // SAFETY: the caller's promise.
            match unsafe { Self::open(&name) } {
                Ok(library) => return Ok(library),
                Err(LoadError::Missing { .. }) if error.is_some() => {}
                // A library that is there and broken must not hide behind another one.
                Err(missing @ LoadError::Missing { .. }) => error = Some(missing),
                Err(broken) => return Err(broken),
            }
        }
        Err(error.unwrap_or_else(|| LoadError::Missing {
            file: PathBuf::from(USUAL_NAMES[0]),
        }))
    }

    /// Loads `file`. A name without a slash is looked for by the system's loader.
    ///
    /// Loading the same file again gives the same functions.
    ///
    /// # Errors
    /// [`LoadError`].
    ///
    /// # Safety
    /// The file is Mooncake's library, or one with the same C interface: its initialisers run, and
    /// functions of the names of [`Functions`] have the signatures declared there.
    pub unsafe fn open(file: impl AsRef<Path>) -> Result<Self, LoadError> {
        let file = file.as_ref();
        let is_path = file.as_os_str().as_encoded_bytes().contains(&b'/');
        if is_path && !file.exists() {
            return Err(LoadError::Missing {
                file: file.to_owned(),
            });
        }
        // All symbols at once: a missing one is an error here and not a crash later. Local, so that none
        // of the library's thousand C++ symbols takes the place of another's.
        // SAFETY: the caller promises that the initialisers may run.
        let opened = unsafe { Handle::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
        let handle = opened.map_err(|error| refusal(file, is_path, &error))?;
        let find = |name: &std::ffi::CStr| {
            // SAFETY: only the address is taken; its type is `fill`'s to give.
            let symbol = unsafe { handle.get::<*mut core::ffi::c_void>(name) }.ok()?;
            let address = symbol.into_raw();
            (!address.is_null()).then_some(address)
        };
        // SAFETY: the caller promises that these are functions of the header; they stay where they are
        // because the handle is never closed.
        let functions = unsafe { Functions::fill(find) };
        // Never unload: the library cannot be unloaded while threads of it may run, and its functions
        // have been copied.
        std::mem::forget(handle);
        match functions {
            Ok(functions) => Ok(Self {
                file: file.to_owned(),
                functions,
            }),
            Err(symbol) => Err(LoadError::MissingSymbol {
                file: file.to_owned(),
                symbol,
            }),
        }
    }

    /// Returns the file as it was asked for.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the functions.
    pub fn functions(&self) -> &Functions {
        &self.functions
    }
}

/// What to try, in order. A variable that is set is the only candidate; an empty one counts as unset.
fn candidates(variable: Option<OsString>) -> Vec<OsString> {
    match variable {
        Some(file) if !file.is_empty() => vec![file],
        _ => USUAL_NAMES.iter().map(OsString::from).collect(),
    }
}

/// Sorts out why the system's loader refused `file`.
fn refusal(file: &Path, is_path: bool, error: &libloading::Error) -> LoadError {
    let reason = match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    };
    let file = file.to_owned();
    if !is_path && names_first(&reason, file.as_os_str()) {
        LoadError::Missing { file }
    } else {
        LoadError::NotALibrary { file, reason }
    }
}

/// Says whether the loader's text is that the bare name itself was not found. A file that was found, and a library
/// that is missing for it, appear otherwise:
/// - glibc begins with the name that it could not find, and a found file has its path there;
/// - musl says the name in both cases, and then the system's reason; a missing library is "needed by" another;
/// - macOS says the name in every case, and then for each place that it tried what was wrong there.
fn names_first(reason: &str, name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let after = |before: &str, behind: &str| {
        reason
            .strip_prefix(before)
            .and_then(|rest| rest.strip_prefix(name))
            .and_then(|rest| rest.strip_prefix(behind))
    };
    if after("", ":").is_some() {
        return true;
    }
    if let Some(rest) = after("Error loading shared library ", ": ") {
        return rest == "No such file or directory";
    }
    let tried = after("dlopen(", ", ")
        .and_then(|rest| rest.split_once("): "))
        .map(|(_, rest)| rest);
    tried.is_some_and(|tried| match tried.strip_prefix("tried: ") {
        Some(places) => places.matches("' (").count() == places.matches("' (no such file").count(),
        None => tried == "image not found",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_the_only_candidate_unless_it_is_empty() {
        assert_eq!(candidates(Some("/a/b.so".into())), ["/a/b.so"]);
        assert_eq!(candidates(Some(OsString::new())), *USUAL_NAMES);
        assert_eq!(candidates(None), *USUAL_NAMES);
    }

    #[test]
    fn a_name_that_was_not_found_is_told_from_one_that_its_dependency_lacks() {
        let name = OsStr::new("libtransfer_engine.so");
        let absent =
            "libtransfer_engine.so: cannot open shared object file: No such file or directory";
        let dependency = "libasio.so: cannot open shared object file: No such file or directory";
        assert!(names_first(absent, name));
        assert!(!names_first(dependency, name));
        assert!(!names_first(
            "/lib/libtransfer_engine.so: file too short",
            name
        ));
        assert!(!names_first("libtransfer_engine.so.1: invalid", name));
    }

    #[test]
    fn the_loaders_of_musl_and_macos_are_understood_too() {
        let name = OsStr::new("libtransfer_engine.so");
        for (reason, is_missing) in [
            (
                "Error loading shared library libtransfer_engine.so: No such file or directory",
                true,
            ),
            (
                "Error loading shared library libtransfer_engine.so: Exec format error",
                false,
            ),
            (
                "Error loading shared library libasio.so: No such file or directory (needed by \
                 /lib/libtransfer_engine.so)",
                false,
            ),
            (
                "dlopen(libtransfer_engine.so, 0x0006): tried: 'libtransfer_engine.so' (no such file), \
                 '/usr/lib/libtransfer_engine.so' (no such file, not in dyld cache)",
                true,
            ),
            (
                "dlopen(libtransfer_engine.so, 0x0006): tried: 'libtransfer_engine.so' (no such file), \
                 '/usr/local/lib/libtransfer_engine.so' (not a mach-o file)",
                false,
            ),
            (
                "dlopen(libtransfer_engine.so, 0x0006): Library not loaded: libasio.dylib",
                false,
            ),
            ("dlopen(libtransfer_engine.so, 6): image not found", true),
        ] {
            assert_eq!(names_first(reason, name), is_missing, "{reason}");
        }
    }
}
