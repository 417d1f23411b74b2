//! Source files: their header, and where unsafe code may be.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::read_text;

/// Crates whose roots forbid unsafe code.
const SAFE_CRATES: &[&str] = &[
    "crates/slab-core",
    "crates/ec-connector",
    "crates/slab-model",
    "xtask",
];

/// The list of files with unsafe code.
const UNSAFE_LIST: &str = "docs/UNSAFE.md";

pub(super) fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let mut with_unsafe = BTreeSet::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|e| e == "rs"))
    {
        let Some(text) = read_text(root, file)? else {
            problems.push(format!("sources: {} is not UTF-8", file.display()));
            continue;
        };
        let path = file.to_string_lossy();
        if is_product_source(&path) && !has_header(&text) {
            problems.push(format!("sources: {path} does not start with a `//!` line"));
        }
        if is_safe_root(&path) && !forbids_unsafe(&text) {
            problems.push(format!("sources: {path} lacks `#![forbid(unsafe_code)]`"));
        }
        if uses_unsafe(&text) {
            with_unsafe.insert(path.into_owned());
        }
    }
    let list = read_text(root, Path::new(UNSAFE_LIST))?.unwrap_or_default();
    problems.extend(compare_unsafe(&with_unsafe, &listed_files(&list)));
    Ok(problems)
}

fn is_product_source(path: &str) -> bool {
    path.starts_with("xtask/src/") || (path.starts_with("crates/") && path.contains("/src/"))
}

fn is_safe_root(path: &str) -> bool {
    SAFE_CRATES
        .iter()
        .filter_map(|dir| path.strip_prefix(dir))
        .any(|rest| rest == "/src/lib.rs" || rest == "/src/main.rs")
}

fn has_header(text: &str) -> bool {
    text.lines()
        .next()
        .is_some_and(|line| line.starts_with("//!") && line.len() > 4)
}

fn forbids_unsafe(text: &str) -> bool {
    code_only(text).contains("#![forbid(unsafe_code)]")
}

/// Whether the word `unsafe` stands in the code itself.
fn uses_unsafe(text: &str) -> bool {
    code_only(text)
        .split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .any(|word| word == "unsafe")
}

/// The paths in the first column of the table.
fn listed_files(list: &str) -> BTreeSet<String> {
    list.lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|rest| rest.split_once('`'))
        .map(|(path, _)| path.to_owned())
        .collect()
}

fn compare_unsafe(found: &BTreeSet<String>, listed: &BTreeSet<String>) -> Vec<String> {
    let unlisted = found
        .difference(listed)
        .map(|file| format!("unsafe: {file} has unsafe code and is not in {UNSAFE_LIST}"));
    let stale = listed
        .difference(found)
        .map(|file| format!("unsafe: {file} is in {UNSAFE_LIST} and has no unsafe code"));
    unlisted.chain(stale).collect()
}

/// The text with comments and the contents of strings blanked.
///
/// Knows line comments, nested block comments, strings, raw strings and
/// character literals; that is all of Rust that can hide a word.
fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let skipped = if rest.starts_with(b"//") {
            rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            block_comment(rest)
        } else if rest[0] == b'"' {
            quoted(rest)
        } else if rest[0] == b'\'' {
            char_literal(rest)
        } else if rest[0] == b'r' && !ends_with_word(&out) {
            raw_string(rest)
        } else {
            0
        };
        if skipped > 0 {
            out.push(' ');
            at += skipped;
        } else {
            // Only ASCII matters to the rules; other bytes become blanks.
            out.push(if rest[0].is_ascii() {
                char::from(rest[0])
            } else {
                ' '
            });
            at += 1;
        }
    }
    out
}

fn ends_with_word(out: &str) -> bool {
    // `br"` is a raw string as well; `for"` is no valid code.
    out.ends_with(|c: char| c.is_alphanumeric() || c == '_') && !out.ends_with('b')
}

fn block_comment(rest: &[u8]) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn quoted(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// The length of a character literal, or 0 for a lifetime.
fn char_literal(rest: &[u8]) -> usize {
    if rest.get(1) == Some(&b'\\') {
        let end = rest.iter().skip(3).position(|b| *b == b'\'');
        return end.map_or(0, |end| end + 4);
    }
    let end = rest.iter().take(6).skip(2).position(|b| *b == b'\'');
    match end {
        // `'a'` or one character of several bytes; `'a, 'b` is no literal.
        Some(0) => 3,
        Some(end) if !rest[1].is_ascii() => end + 3,
        _ => 0,
    }
}

fn raw_string(rest: &[u8]) -> usize {
    let hashes = rest[1..].iter().take_while(|b| **b == b'#').count();
    if rest.get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let body = &rest[2 + hashes..];
    let mut at = 0;
    while at < body.len() {
        if body[at] == b'"' && body[at + 1..].iter().take_while(|b| **b == b'#').count() >= hashes {
            return 2 + hashes + at + 1 + hashes;
        }
        at += 1;
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_needs_its_header() {
        assert!(has_header("//! What it is.\nfn a() {}\n"));
        assert!(!has_header("fn a() {}\n"));
        assert!(!has_header("//!\nfn a() {}\n"));
        assert!(!has_header("// Not a doc comment.\n"));
        assert!(!has_header(""));
    }

    #[test]
    fn the_attribute_counts_only_as_code() {
        assert!(forbids_unsafe("//! A.\n#![forbid(unsafe_code)]\n"));
        assert!(!forbids_unsafe("//! A.\n// #![forbid(unsafe_code)]\n"));
        assert!(!forbids_unsafe("//! A.\n#![deny(unsafe_code)]\n"));
    }

    #[test]
    fn unsafe_is_found_in_code_only() {
        assert!(uses_unsafe("fn a() { unsafe { b() } }"));
        assert!(uses_unsafe("pub unsafe trait M {}"));
        assert!(uses_unsafe("let c = '\"'; unsafe {}"));
        assert!(uses_unsafe("let c = '\\''; unsafe {} // '"));
        assert!(uses_unsafe("fn a<'a>(x: &'a str) { unsafe {} }"));
        assert!(uses_unsafe("let s = r#\"a\"b\"#; unsafe {}"));
        assert!(uses_unsafe("/* a /* b */ c */ unsafe {}"));
        for hidden in [
            "// unsafe",
            "/// unsafe {\n",
            "/* unsafe /* x */ unsafe */",
            "let s = \"unsafe\";",
            "let s = \"a\\\"unsafe\";",
            "let s = r#\"\"unsafe\"#;",
            "#![forbid(unsafe_code)]",
            "let unsafety = 1;",
        ] {
            assert!(!uses_unsafe(hidden), "{hidden}");
        }
    }

    #[test]
    fn the_list_and_the_code_must_agree() {
        let listed =
            listed_files("| file | what |\n| --- | --- |\n| `a.rs` | x `b` |\n| `b.rs` | y |\n");
        assert_eq!(listed.len(), 2);
        let found = ["a.rs", "c.rs"].map(str::to_owned).into();
        let problems = compare_unsafe(&found, &listed);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("c.rs") && problems[1].contains("b.rs"));
        assert!(compare_unsafe(&listed, &listed).is_empty());
    }

    #[test]
    fn roots_and_sources_are_told_apart() {
        assert!(is_safe_root("crates/slab-core/src/lib.rs"));
        assert!(is_safe_root("xtask/src/main.rs"));
        assert!(!is_safe_root("crates/slab-core/src/pool.rs"));
        assert!(!is_safe_root("crates/slab-memory/src/lib.rs"));
        assert!(is_product_source("crates/a/src/b/c.rs"));
        assert!(!is_product_source("crates/a/tests/b.rs"));
    }
}
