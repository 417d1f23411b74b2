//! What the READMEs promise exists: commands, packages, licence files.

use std::path::Path;

use anyhow::Result;
use clap::CommandFactory;

use super::read_text;
use crate::workspace::Metadata;

pub(super) fn check(root: &Path, metadata: &Metadata) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let xtask = crate::Cli::command();
    let mut commands = Vec::new();
    for package in metadata.members() {
        let Some(dir) = package.manifest_path.parent() else {
            continue;
        };
        for entry in std::fs::read_dir(dir.join("src/cli")).into_iter().flatten() {
            let name = entry?.file_name();
            if let Some(command) = name.to_string_lossy().strip_suffix(".rs") {
                commands.push((package.name.clone(), command.to_owned()));
            }
        }
    }
    let known = Known {
        commands,
        xtask: xtask
            .get_subcommands()
            .map(|command| command.get_name().to_owned())
            .collect(),
        packages: metadata
            .members()
            .map(|package| package.name.clone())
            .collect(),
    };
    for name in ["README.md", "CONTRIBUTING.md", "docs/TESTING.md"] {
        match root.join(name).is_file() {
            true => {
                let text = read_text(root, Path::new(name))?.unwrap_or_default();
                problems.extend(
                    unknown_commands(&text, &known)
                        .into_iter()
                        .map(|problem| format!("readme: {name}: {problem}")),
                );
            }
            false => problems.push(format!("readme: there is no {name}")),
        }
    }
    for package in metadata.members().filter(|package| package.is_published()) {
        let Some(dir) = package.manifest_path.parent() else {
            continue;
        };
        for file in ["README.md", "LICENSE-APACHE", "LICENSE-MIT"] {
            // A heading alone tells a reader nothing.
            let size = std::fs::metadata(dir.join(file))
                .map(|meta| meta.len())
                .unwrap_or(0);
            if size < 200 {
                problems.push(format!(
                    "readme: {} lacks a {file} of substance",
                    package.name
                ));
            }
        }
        if package
            .description
            .as_deref()
            .unwrap_or_default()
            .is_empty()
        {
            problems.push(format!("readme: {} has no description", package.name));
        }
    }
    Ok(problems)
}

/// What commands may refer to.
struct Known {
    xtask: Vec<String>,
    packages: Vec<String>,
    /// Files `src/cli/<command>.rs`, as `(package, command)`.
    commands: Vec<(String, String)>,
}

/// The cargo commands of the fenced blocks that refer to nothing.
fn unknown_commands(text: &str, known: &Known) -> Vec<String> {
    let mut problems = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let words: Vec<&str> = line
            .split_whitespace()
            .take_while(|word| *word != "#")
            .collect();
        let words = match words.first() {
            Some(&"$") => &words[1..],
            _ => &words[..],
        };
        if !fenced || words.first() != Some(&"cargo") {
            continue;
        }
        if words.get(1) == Some(&"xtask") {
            let command = words[2..].iter().find(|word| !word.starts_with('-'));
            if !command.is_some_and(|command| known.xtask.iter().any(|name| name == command)) {
                problems.push(format!("no such command: `{}`", words.join(" ")));
            }
        }
        if let Some((package, command)) = program_call(words)
            && !known
                .commands
                .iter()
                .any(|(p, c)| p == package && c == command)
        {
            problems.push(format!("no such command: `{}`", words.join(" ")));
        }
        for pair in words
            .windows(2)
            .filter(|pair| ["-p", "--package"].contains(&pair[0]))
        {
            if !known.packages.iter().any(|name| name == pair[1]) {
                problems.push(format!("no such package: `{}`", words.join(" ")));
            }
        }
    }
    problems
}

/// The package and the command of `cargo run … -p PACKAGE … -- COMMAND …`.
fn program_call<'a>(words: &[&'a str]) -> Option<(&'a str, &'a str)> {
    let package = words
        .windows(2)
        .find(|pair| ["-p", "--package"].contains(&pair[0]))?[1];
    let end = words.iter().position(|word| *word == "--")?;
    let command = words.get(end + 1)?;
    (words.get(1) == Some(&"run") && !command.starts_with('-')).then_some((package, command))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> usize {
        let known = Known {
            xtask: vec!["test".to_owned()],
            packages: vec!["slab-core".to_owned()],
            commands: vec![("slab-core".to_owned(), "demo".to_owned())],
        };
        unknown_commands(text, &known).len()
    }

    #[test]
    fn commands_that_exist_pass() {
        assert_eq!(
            problems("```sh\ncargo xtask test   # all of it\n$ cargo run -p slab-core\n```\n"),
            0
        );
        assert_eq!(problems("cargo xtask zap is mentioned in prose\n"), 0);
    }

    #[test]
    fn commands_that_do_not_exist_are_found() {
        assert_eq!(problems("```\ncargo xtask zap\n```\n"), 1);
        assert_eq!(problems("```\ncargo xtask\n```\n"), 1);
        assert_eq!(
            problems("```\ncargo run -p slab-core -- demo --x\n```\n"),
            0
        );
        assert_eq!(problems("```\ncargo run -p slab-core -- dance\n```\n"), 1);
        assert_eq!(
            problems("```\ncargo run --release -p nothing -- demo\n```\n"),
            2
        );
    }
}
