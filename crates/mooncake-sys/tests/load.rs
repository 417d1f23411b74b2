//! What a program is told about a library that cannot be used.

use std::path::Path;
use std::process::Command;

use mooncake_sys::{LIBRARY_VARIABLE, Library, LoadError, REQUIRED_SYMBOLS, USUAL_NAMES};

fn open(file: &Path) -> Result<Library, LoadError> {
    // SAFETY: the files of these tests are no libraries, or the system's own C library, and nothing of
    // them is called.
    unsafe { Library::open(file) }
}

#[test]
fn a_file_that_is_not_there_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("libtransfer_engine.so");
    let error = open(&file).unwrap_err();
    assert_eq!(error, LoadError::Missing { file: file.clone() });
    let text = error.to_string();
    assert!(text.contains(file.to_str().unwrap()), "{text}");
    assert!(text.contains(LIBRARY_VARIABLE), "{text}");
}

#[test]
fn a_name_that_the_loader_does_not_find_is_missing() {
    let file = Path::new("libno_such_transfer_engine.so");
    assert_eq!(
        open(file).unwrap_err(),
        LoadError::Missing { file: file.into() }
    );
}

#[test]
fn a_text_file_is_no_library() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("libtransfer_engine.so");
    std::fs::write(&file, "not an object file").unwrap();
    let error = open(&file).unwrap_err();
    let LoadError::NotALibrary {
        file: named,
        reason,
    } = &error
    else {
        panic!("{error:?}");
    };
    assert_eq!(*named, file);
    assert!(!reason.is_empty());
    assert!(error.to_string().contains(file.to_str().unwrap()));
    // A folder is there as well, and is none either.
    let error = open(directory.path()).unwrap_err();
    assert!(matches!(error, LoadError::NotALibrary { .. }), "{error:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_library_without_the_functions_is_told_by_the_first_it_lacks() {
    let file = Path::new("libc.so.6");
    let error = open(file).unwrap_err();
    assert_eq!(
        error,
        LoadError::MissingSymbol {
            file: file.into(),
            symbol: REQUIRED_SYMBOLS[0]
        }
    );
    let text = error.to_string();
    assert!(
        text.contains("libc.so.6") && text.contains("createTransferEngine"),
        "{text}"
    );
}

/// Set in the process that `load_in_a_process` starts.
const INNER: &str = "MOONCAKE_SYS_TEST_INNER";

/// What `Library::load` answers in a process with `MOONCAKE_LIBRARY` as given. The process runs the test
/// `the_environment_names_the_library`, which then only prints the answer.
fn load_in_a_process(variable: Option<&Path>) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "--nocapture",
            "the_environment_names_the_library",
        ])
        .env(INNER, "1")
        .env_remove(LIBRARY_VARIABLE);
    if let Some(file) = variable {
        command.env(LIBRARY_VARIABLE, file);
    }
    let output = command.output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_environment_names_the_library() {
    if std::env::var_os(INNER).is_some() {
        // SAFETY: as in `open`.
        println!("{:?}", unsafe { Library::load() });
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("mine.so");
    let said = load_in_a_process(Some(&file));
    assert!(
        said.contains("Missing") && said.contains("mine.so"),
        "{said}"
    );
    std::fs::write(&file, "").unwrap();
    let said = load_in_a_process(Some(&file));
    assert!(
        said.contains("NotALibrary") && said.contains("mine.so"),
        "{said}"
    );
    let said = load_in_a_process(Some(Path::new("libc.so.6")));
    assert!(
        said.contains("MissingSymbol") && said.contains("createTransferEngine"),
        "{said}"
    );
}

#[test]
fn without_the_variable_the_usual_name_is_looked_for() {
    // Where Mooncake is installed it is found instead.
    let said = load_in_a_process(None);
    assert!(
        said.contains(USUAL_NAMES[0]) && (said.contains("Missing") || said.contains("Ok(")),
        "{said}"
    );
}
