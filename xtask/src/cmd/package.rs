//! `package`: builds the published crates from their packages alone.
//!
//! Cargo's own verification unpacks the packages into its cache under the
//! user's home, where a later run with the same version finds them again,
//! changed or not. So the packages are unpacked below `target` here and
//! checked in a workspace of their own, each replaced by its package.

mod scratch;

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::runner::Runner;
use crate::workspace::{FEATURE_SETS, Metadata, Package};

/// Packages the published crates and builds them from the packages
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Accept changes that are not committed
    #[arg(long)]
    pub(crate) allow_dirty: bool,
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let metadata = Metadata::load(runner)?;
        let published: Vec<_> = metadata.members().filter(|p| p.is_published()).collect();
        let mut command = runner.cargo(&["package", "--locked", "--quiet", "--workspace"]);
        command.arg("--no-verify");
        for package in metadata.members().filter(|package| !package.is_published()) {
            command.args(["--exclude", &package.name]);
        }
        if self.allow_dirty {
            command.arg("--allow-dirty");
        }
        runner.run(&mut command)?;

        let dir = runner.root().join("target/xtask/packages");
        if !runner.is_dry_run() {
            if dir.exists() {
                fs::remove_dir_all(&dir)?;
            }
            fs::create_dir_all(&dir)?;
            fs::write(dir.join("Cargo.toml"), workspace_manifest(&published))?;
            // The versions that everything else was tested with.
            fs::copy(runner.root().join("Cargo.lock"), dir.join("Cargo.lock"))?;
        }
        for package in &published {
            let archive = format!("target/package/{}.crate", folder(package));
            let mut unpack = Command::new("tar");
            unpack
                .arg("-xzf")
                .arg(runner.root().join(archive))
                .arg("-C")
                .arg(&dir);
            runner.run(&mut unpack).context("cannot unpack a package")?;
        }
        // One by one: each has to build with the features that it asks for
        // itself, and with those that its README offers.
        let by_default = published.iter().map(|package| vec![package.name.as_str()]);
        let by_choice = FEATURE_SETS.iter().map(|features| features.to_vec());
        for features in by_default.chain(by_choice) {
            let mut check = runner.cargo(&["check", "--offline", "--quiet", "-p"]);
            check
                .args(features)
                .arg("--manifest-path")
                .arg(dir.join("Cargo.toml"))
                .arg("--target-dir")
                .arg(runner.root().join("target"));
            runner.run(&mut check)?;
        }
        scratch::run(runner, &dir, &published)
    }
}

/// The name of the folder in a package.
fn folder(package: &Package) -> String {
    format!("{}-{}", package.name, package.version)
}

/// A workspace of the unpacked packages, each of which stands in for the
/// published crate of its name.
fn workspace_manifest(published: &[&Package]) -> String {
    let mut text = String::from("[workspace]\nresolver = \"3\"\nmembers = [");
    for package in published {
        text.push_str(&format!("{:?}, ", folder(package)));
    }
    text.push_str("]\n\n[profile.dev]\nopt-level = 1\n\n[patch.crates-io]\n");
    for package in published {
        text.push_str(&format!(
            "{} = {{ path = {:?} }}\n",
            package.name,
            folder(package)
        ));
    }
    text
}
