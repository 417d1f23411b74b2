//! What the real-input and real-peer tests use, under `target/fixture`.
//!
//! ```text
//! venv/      Python packages of fixture/requirements.txt
//! debian/    shared libraries that the Mooncake wheel needs, unpacked
//! servers/   etcd and Redis, unpacked
//! python     starts the venv's python with those libraries
//! etcd, redis-server
//!            start the servers
//! *.stamp    the recipe that the folder beside it was made by
//! ```
//!
//! Nothing outside `target` is changed: pip and apt keep their caches, lists
//! and logs in it, and no package is installed into the system. A folder is
//! complete when its stamp is there; without one it is made anew.

mod debian;
mod python;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use rustix::fs::{FlockOperation, flock};

use crate::process::{Streams, capture};
use crate::report::Class;

/// How far the fixture has come.
pub(crate) struct Fixture {
    dir: PathBuf,
    /// The Python packages are there.
    packages: bool,
    /// The libraries that the Mooncake wheel needs are there too.
    libraries: bool,
    /// The servers that the metadata tests start are there.
    servers: bool,
    error: Option<Error>,
}

/// Makes what is missing. Needs no network when everything is there.
pub(crate) fn prepare(root: &Path) -> Fixture {
    let dir = root.join("target/fixture");
    let mut fixture = Fixture {
        dir,
        packages: false,
        libraries: false,
        servers: false,
        error: None,
    };
    if let Err(error) = fixture.fill() {
        fixture.error = Some(error);
    }
    fixture
}

impl Fixture {
    fn fill(&mut self) -> Result<()> {
        fs::create_dir_all(&self.dir)?;
        // Two runs at once would unpack over each other.
        let lock = fs::File::create(self.dir.join("lock"))?;
        flock(&lock, FlockOperation::LockExclusive).context("cannot lock the fixture")?;
        python::install(&self.dir).context("Python packages")?;
        write_python_launcher(&self.dir)?;
        self.packages = true;
        let libraries = debian::install(&self.dir).context("Debian libraries");
        // The search path is known only now.
        write_python_launcher(&self.dir)?;
        libraries?;
        self.check_wheel()?;
        self.libraries = true;
        debian::install_servers(&self.dir).context("Debian servers")?;
        for name in SERVERS {
            self.write_server_launcher(name)?;
        }
        self.servers = true;
        Ok(())
    }

    /// A server that does not start is a broken fixture too.
    fn write_server_launcher(&self, name: &str) -> Result<()> {
        let servers = self.dir.join("servers");
        let program = servers.join("usr/bin").join(name);
        let launcher = self.dir.join(name);
        let libraries = debian::library_dirs(&servers)?;
        write_launcher(&launcher, &program, &libraries, &[])?;
        run(Command::new(launcher).arg("--version"))
            .with_context(|| format!("{name} does not start"))?;
        Ok(())
    }

    /// A wheel that does not load is a broken fixture, not a failing test.
    fn check_wheel(&self) -> Result<()> {
        let stamp = Stamp::new(&self.dir, "wheel", "imports with zmq".to_owned());
        if stamp.is_current() {
            return Ok(());
        }
        let mut command = Command::new(self.launcher());
        run(command.args(["-c", "import mooncake.engine, numpy, safetensors, zmq"]))
            .context("the Mooncake wheel does not load")?;
        stamp.set()
    }

    fn launcher(&self) -> PathBuf {
        self.dir.join("python")
    }

    /// Whether tests of this class can run.
    pub(crate) fn provides(&self, class: Class) -> bool {
        match class {
            Class::NeedsNetwork => self.packages && self.libraries,
            Class::NeedsDebian => self.libraries && self.servers,
            _ => false,
        }
    }

    /// What a test is told about the fixture; nothing that does not exist.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = Vec::new();
        if self.packages {
            variables.push(("EC_FIXTURE_PYTHON", self.launcher().into_os_string()));
            if let Ok(Some(file)) = python::safetensors_file(&self.dir) {
                variables.push(("EC_FIXTURE_SAFETENSORS", file.into_os_string()));
            }
        }
        if self.servers {
            let servers = SERVERS.map(|name| self.dir.join(name).into_os_string());
            variables.extend(SERVER_VARIABLES.into_iter().zip(servers));
        }
        variables
    }

    /// The reason why something is missing.
    pub(crate) fn into_result(self) -> Result<()> {
        self.error.map_or(Ok(()), Err)
    }
}

/// The servers that the metadata tests start, as the packages call the programs.
const SERVERS: [&str; 2] = ["etcd", "redis-server"];

/// Where the tests find them.
const SERVER_VARIABLES: [&str; 2] = ["EC_FIXTURE_ETCD", "EC_FIXTURE_REDIS"];

fn write_python_launcher(dir: &Path) -> Result<()> {
    write_launcher(
        &dir.join("python"),
        &dir.join("venv/bin/python"),
        &debian::library_dirs(&dir.join("debian"))?,
        &[
            "PYTHONDONTWRITEBYTECODE=1",
            "PYTHONNOUSERSITE=1",
            "export PYTHONDONTWRITEBYTECODE PYTHONNOUSERSITE",
            "unset PYTHONPATH PYTHONHOME",
        ],
    )
}

/// A script instead of a variable for the tests: the libraries are meant for
/// the program alone, and no test can forget them.
fn write_launcher(
    file: &Path,
    program: &Path,
    libraries: &[PathBuf],
    settings: &[&str],
) -> Result<()> {
    let libraries: Vec<String> = libraries
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let mut script = format!(
        "#!/bin/sh\n\
         LD_LIBRARY_PATH='{}'\"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n\
         export LD_LIBRARY_PATH\n",
        quoted(&libraries.join(":"))
    );
    for line in settings {
        script.push_str(line);
        script.push('\n');
    }
    // In place of the shell, so that whoever ends the process ends the program.
    let program = quoted(&program.display().to_string());
    script.push_str(&format!("exec '{program}' \"$@\"\n"));
    if fs::read_to_string(file).is_ok_and(|old| old == script) {
        return Ok(());
    }
    // Renamed into place: a script that is being run may not be written to.
    let fresh = file.with_extension("new");
    fs::write(&fresh, script)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
    fs::rename(fresh, file).with_context(|| format!("cannot write {}", file.display()))
}

/// The text as it stands between single quotes in a shell script.
fn quoted(text: &str) -> String {
    text.replace('\'', r"'\''")
}

/// Says by which recipe a folder was made.
struct Stamp {
    file: PathBuf,
    recipe: String,
}

impl Stamp {
    fn new(dir: &Path, name: &str, recipe: String) -> Self {
        Self {
            file: dir.join(format!("{name}.stamp")),
            recipe,
        }
    }

    fn is_current(&self) -> bool {
        fs::read_to_string(&self.file).is_ok_and(|text| text == self.recipe)
    }

    fn clear(&self) -> Result<()> {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn set(&self) -> Result<()> {
        fs::write(&self.file, &self.recipe)?;
        Ok(())
    }
}

/// Removes and creates a folder.
fn fresh_dir(dir: &Path) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))
}

/// No step of the fixture takes longer on a link that is of any use.
const STEP_LIMIT: Duration = Duration::from_secs(600);

/// Runs a program quietly; its output becomes the error if it fails.
fn run(command: &mut Command) -> Result<String> {
    println!("+ {}", crate::runner::display(command));
    let captured = capture(command, Streams::Joined, STEP_LIMIT)?;
    if !captured.is_success() {
        bail!(
            "`{}`: {}\n{}",
            command.get_program().display(),
            captured.ending(),
            captured.stdout.trim_end()
        );
    }
    Ok(captured.stdout)
}

/// Runs something that goes over the network: three tries, with a pause that
/// grows.
fn with_retries<T>(mut step: impl FnMut() -> Result<T>) -> Result<T> {
    let mut pause = Duration::from_secs(2);
    for _ in 0..2 {
        match step() {
            Ok(value) => return Ok(value),
            Err(error) => println!("again in {} s: {error:#}", pause.as_secs()),
        }
        std::thread::sleep(pause);
        pause *= 4;
    }
    step()
}

/// The first of `names` that is a program on the search path.
fn find_program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    names.iter().find_map(|name| {
        std::env::split_paths(&path)
            .map(|dir| dir.join(name))
            .find(|file| file.is_file())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_tried_again_until_it_works() {
        let mut calls = 0;
        let result = with_retries(|| {
            calls += 1;
            if calls < 2 {
                bail!("no route")
            } else {
                Ok(calls)
            }
        });
        assert_eq!(result.unwrap(), 2);
    }

    #[test]
    fn quotes_survive_in_the_launcher() {
        assert_eq!(quoted("a'b"), r"a'\''b");
    }
}
