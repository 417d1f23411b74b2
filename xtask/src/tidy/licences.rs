//! Every dependency can be used under one of a short list of licences.

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

pub(super) fn check(metadata: &Metadata) -> Vec<String> {
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
    use super::is_allowed;

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
