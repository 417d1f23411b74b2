//! Rules about the tree itself. Each rule is a function from text or metadata
//! to a list of problems, so that a broken example can show that it fails.

pub(crate) mod coverage;
mod layers;
pub(crate) mod licences;
mod links;
mod readme;
mod sources;
mod words;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::report::Run;
use crate::workspace::Metadata;

/// All problems of the tree; the rules about tests need the last run.
pub(crate) fn check(root: &Path, metadata: &Metadata, run: Option<&Run>) -> Result<Vec<String>> {
    let files = tracked_files(root)?;
    let mut problems = layers::check(&layers::edges(metadata));
    problems.extend(licences::check(root, metadata)?);
    problems.extend(sources::check(root, &files)?);
    problems.extend(words::check(root, &files)?);
    problems.extend(links::check(root, &files)?);
    problems.extend(readme::check(root, metadata)?);
    if let Some(run) = run {
        problems.extend(coverage::check(root, run)?);
    }
    Ok(problems)
}

/// Files that git tracks or would track, relative to the root.
fn tracked_files(root: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!(
            "`git ls-files` failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut files: Vec<PathBuf> = text
        .split('\0')
        .filter(|s| !s.is_empty())
        .map(Into::into)
        .collect();
    // A file that was deleted and not yet committed is still listed.
    files.retain(|file| root.join(file).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// The text of a file, or nothing if it is not text.
fn read_text(root: &Path, file: &Path) -> Result<Option<String>> {
    let bytes = std::fs::read(root.join(file))
        .with_context(|| format!("cannot read {}", file.display()))?;
    Ok(String::from_utf8(bytes).ok())
}
