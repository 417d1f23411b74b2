//! Runs programs one after the other: prints each before it starts and stops
//! at the first that fails.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Where commands run, and whether they run at all.
pub(crate) struct Runner {
    root: PathBuf,
    dry_run: bool,
}

impl Runner {
    pub(crate) fn new(dry_run: bool) -> Result<Self> {
        // The manifest directory is that of xtask itself, whichever directory
        // the command was typed in.
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().context("xtask has no parent directory")?;
        Ok(Self {
            root: root.to_path_buf(),
            dry_run,
        })
    }

    /// The workspace root.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn is_dry_run(&self) -> bool {
        self.dry_run
    }

    /// A cargo command in the workspace root, not started.
    pub(crate) fn cargo<S: AsRef<std::ffi::OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(args).current_dir(&self.root);
        command
    }

    /// Prints `+ program arguments` and runs the program with our own output.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        println!("+ {}", display(command));
        if self.dry_run {
            return Ok(());
        }
        let status = command
            .status()
            .with_context(|| format!("cannot start `{}`", command.get_program().display()))?;
        if !status.success() {
            bail!("`{}` failed ({status})", display(command));
        }
        Ok(())
    }
}

/// The command as one would type it; variables it sets stand in front.
pub(crate) fn display(command: &Command) -> String {
    let mut text = String::new();
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            text.push_str(&format!("{}={:?} ", key.display(), value));
        }
    }
    let program = Path::new(command.get_program());
    text.push_str(
        &program
            .file_name()
            .unwrap_or(program.as_os_str())
            .to_string_lossy(),
    );
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}
