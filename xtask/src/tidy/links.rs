//! Links between documents lead somewhere.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::read_text;

pub(super) fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|e| e == "md"))
    {
        let text = read_text(root, file)?.unwrap_or_default();
        let dir = root.join(file.parent().unwrap_or(Path::new("")));
        for target in targets(&text).filter(|target| !dir.join(target).exists()) {
            problems.push(format!(
                "links: {} leads to {target}, which is not there",
                file.display()
            ));
        }
    }
    Ok(problems)
}

/// The paths that a document links to; addresses and places within the
/// document are left out.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let target = rest.split([')', ' ']).next()?;
        let path = target.split('#').next()?;
        let is_local = !path.is_empty() && !path.contains("://") && !path.starts_with("mailto:");
        is_local.then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_paths_are_found_without_their_fragments() {
        let text =
            "[a](docs/a.md#part), [b](https://example.org/x), [c](#here) and [d](d.md \"t\")";
        assert_eq!(targets(text).collect::<Vec<_>>(), ["docs/a.md", "d.md"]);
    }

    #[test]
    fn a_link_to_nothing_is_a_problem() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(root.join("Cargo.toml").exists());
        let dir = root.join("src");
        let broken = targets("[x](no/such/file.md) [y](tidy.rs)")
            .filter(|target| !dir.join(target).exists())
            .collect::<Vec<_>>();
        assert_eq!(broken, ["no/such/file.md"]);
    }
}
