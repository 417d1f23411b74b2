//! Words that have no business in the project: paths of one person's machine,
//! hosts of package registries.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::read_text;

/// Split in two so that this file does not contain them itself.
const FORBIDDEN: &[(&str, &str)] = &[
    ("/ro", "ot/"),
    ("/ho", "me/"),
    ("/Use", "rs/"),
    ("index.cra", "tes.io"),
    ("static.cra", "tes.io"),
    ("py", "pi.org"),
    ("python", "hosted.org"),
    ("deb.deb", "ian.org"),
    ("security.deb", "ian.org"),
    ("snapshot.deb", "ian.org"),
    ("registry.npm", "js.org"),
];

pub(super) fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files {
        if let Some(text) = read_text(root, file)? {
            for (line, word) in find(&text) {
                problems.push(format!("words: {}:{line} says `{word}`", file.display()));
            }
        }
    }
    Ok(problems)
}

/// The forbidden words of a text with their line numbers.
fn find(text: &str) -> Vec<(usize, String)> {
    let words: Vec<String> = FORBIDDEN.iter().map(|(a, b)| format!("{a}{b}")).collect();
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for word in words.iter().filter(|word| line.contains(word.as_str())) {
            found.push((index + 1, word.clone()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_forbidden_word_is_found_with_its_line() {
        for (a, b) in FORBIDDEN {
            let word = format!("{a}{b}");
            let found = find(&format!("fine\nsee {word}x\n"));
            assert!(found.contains(&(2, word)), "{found:?}");
        }
        assert!(find("the workspace root, a shared pool, a registry\n").is_empty());
    }
}
