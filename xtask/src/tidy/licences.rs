//! Every dependency can be used under one of a short list of licences, and
//! `THIRD-PARTY.md` lists those that end up in the product.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::Metadata;

/// Licences whose terms `THIRD-PARTY.md` deals with.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// The file with the list, and the lines it stands between.
const FILE: &str = "THIRD-PARTY.md";
const BEGIN: &str = "<!-- begin: cargo xtask licences -->";
const END: &str = "<!-- end -->";

pub(super) fn check(root: &Path, metadata: &Metadata) -> Result<Vec<String>> {
    let mut problems = check_packages(metadata);
    let file = root.join(FILE);
    match std::fs::read_to_string(&file) {
        Ok(text) => {
            if with_list(&text, &list(metadata)).is_none_or(|fresh| fresh != text) {
                problems.push(format!(
                    "licences: {FILE} is stale; run `cargo xtask licences`"
                ));
            }
        }
        Err(error) => problems.push(format!("licences: cannot read {FILE}: {error}")),
    }
    Ok(problems)
}

/// Writes the list into the file; returns how many crates it names.
pub(crate) fn update(root: &Path, metadata: &Metadata) -> Result<usize> {
    let file = root.join(FILE);
    let text = std::fs::read_to_string(&file)?;
    let list = list(metadata);
    let text = with_list(&text, &list)
        .with_context(|| format!("{FILE} lacks the lines `{BEGIN}` and `{END}`"))?;
    std::fs::write(file, text)?;
    Ok(list.len())
}

/// Name and licence of everything that the published crates are built from.
fn list(metadata: &Metadata) -> BTreeMap<String, String> {
    metadata
        .product_dependencies()
        .into_iter()
        .map(|package| {
            (
                package.name.clone(),
                package.license.clone().unwrap_or_default(),
            )
        })
        .collect()
}

/// The text with the list between its marks, or nothing if they are missing.
fn with_list(text: &str, list: &BTreeMap<String, String>) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    let mut fresh = format!("{before}{BEGIN}\n| crate | licence |\n| --- | --- |\n");
    for (name, licence) in list {
        fresh.push_str(&format!("| {name} | {licence} |\n"));
    }
    Some(fresh + END + after)
}

fn check_packages(metadata: &Metadata) -> Vec<String> {
    metadata
        .packages
        .iter()
        .filter_map(|package| {
            let name = format!("{} {}", package.name, package.version);
            match &package.license {
                None => Some(format!("licences: {name} states none")),
                Some(text) if !is_allowed(text) => {
                    Some(format!("licences: {name} is under `{text}`"))
                }
                Some(_) => None,
            }
        })
        .collect()
}

/// Whether an SPDX expression offers a choice that is on the list. The old
/// form with a slash means OR. What cannot be read is not allowed.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let mut tokens = spaced.split_whitespace().peekable();
    let allowed = any_of(&mut tokens);
    allowed == Some(true) && tokens.next().is_none()
}

type Tokens<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(tokens: &mut Tokens<'_>) -> Option<bool> {
    let mut result = all_of(tokens)?;
    while tokens.next_if_eq(&"OR").is_some() {
        result |= all_of(tokens)?;
    }
    Some(result)
}

fn all_of(tokens: &mut Tokens<'_>) -> Option<bool> {
    let mut result = one(tokens)?;
    while tokens.next_if_eq(&"AND").is_some() {
        result &= one(tokens)?;
    }
    Some(result)
}

fn one(tokens: &mut Tokens<'_>) -> Option<bool> {
    let token = tokens.next()?;
    if token == "(" {
        let result = any_of(tokens)?;
        return (tokens.next() == Some(")")).then_some(result);
    }
    let mut licence = token.to_owned();
    if tokens.next_if_eq(&"WITH").is_some() {
        licence = format!("{licence} WITH {}", tokens.next()?);
    }
    Some(ALLOWED.contains(&licence.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_rewritten_between_its_marks() {
        let list = BTreeMap::from([("a".to_owned(), "MIT".to_owned())]);
        let text = format!("head\n{BEGIN}\n| old | GPL |\n{END}\ntail\n");
        let fresh = with_list(&text, &list).unwrap();
        assert!(fresh.starts_with("head\n") && fresh.ends_with("\ntail\n"));
        assert!(fresh.contains("| a | MIT |\n") && !fresh.contains("old"));
        assert_eq!(with_list(&fresh, &list), Some(fresh.clone()), "stable");
        assert_ne!(fresh, text, "a stale list is noticed");
        assert_eq!(with_list("no marks", &list), None);
    }

    #[test]
    fn a_choice_is_enough_and_a_conjunction_needs_both() {
        for good in [
            "MIT",
            "MIT OR GPL-3.0-only",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
        ] {
            assert!(is_allowed(good), "{good}");
        }
    }

    #[test]
    fn foreign_and_unreadable_licences_are_refused() {
        for bad in [
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR Apache-2.0) AND LGPL-2.1",
            "Apache-2.0 WITH Strange-exception",
            "MIT OR",
            "(MIT",
            "MIT Apache-2.0",
            "",
        ] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
