//! A crate of somebody else's, which depends on one packaged crate alone and runs the examples of its README.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::runner::Runner;

/// Runs each example in the README of the package unpacked at `folder` below `packages`. An example names the
/// feature that it needs in a comment ("with the feature `alloc`"); without one, the crate is built with none.
pub(super) fn run(runner: &Runner, packages: &Path, name: &str, folder: &str) -> Result<()> {
    if runner.is_dry_run() {
        return Ok(());
    }
    let readme = packages.join(folder).join("README.md");
    let readme =
        fs::read_to_string(&readme).with_context(|| format!("cannot read {}", readme.display()))?;
    let examples = examples(&readme);
    ensure!(!examples.is_empty(), "the README of {name} has no example");
    for (number, example) in examples.into_iter().enumerate() {
        let dir = runner
            .root()
            .join(format!("target/xtask/scratch/{name}-{number}"));
        fs::create_dir_all(dir.join("src"))?;
        fs::write(dir.join("src/main.rs"), example.program())?;
        fs::write(
            dir.join("Cargo.toml"),
            manifest(name, folder, example.feature),
        )?;
        // The versions that everything else was tested with.
        fs::copy(packages.join("Cargo.lock"), dir.join("Cargo.lock"))?;
        let mut run = runner.cargo(&["run", "--offline", "--quiet", "--manifest-path"]);
        run.arg(dir.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(dir.join("target"));
        runner.run(&mut run)?;
    }
    Ok(())
}

fn manifest(name: &str, folder: &str, feature: Option<&str>) -> String {
    let features: Vec<&str> = feature.into_iter().collect();
    format!(
        "[package]\nname = \"scratch\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
         {name} = {{ path = \"../../packages/{folder}\", features = {features:?} }}\n"
    )
}

struct Example<'a> {
    lines: Vec<&'a str>,
    feature: Option<&'a str>,
}

impl Example<'_> {
    /// As rustdoc would: lines that start with `# ` are part of it, though the README's readers do not see them.
    fn program(&self) -> String {
        let mut program = String::from("fn main() -> Result<(), Box<dyn std::error::Error>> {\n");
        for line in &self.lines {
            if !line.starts_with("# Ok::<") {
                program.push_str(line.strip_prefix("# ").unwrap_or(line));
                program.push('\n');
            }
        }
        program.push_str("Ok(())\n}\n");
        program
    }
}

/// The blocks of Rust in a page of Markdown.
fn examples(page: &str) -> Vec<Example<'_>> {
    let mut examples = Vec::new();
    let mut lines = page.lines();
    while lines.by_ref().any(|line| line.trim() == "```rust") {
        let lines: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        let feature = lines.iter().find_map(|line| {
            let (_, rest) = line.split_once("with the feature `")?;
            rest.split_once('`').map(|(feature, _)| feature)
        });
        examples.push(Example { lines, feature });
    }
    examples
}

#[cfg(test)]
mod tests {
    use super::{examples, manifest};

    #[test]
    fn each_block_of_rust_is_an_example_with_the_feature_it_names() {
        let page = "text\n```rust\nuse a::B; // with the feature `alloc`\nlet b = B?;\n# Ok::<(), E>(())\n```\n\
                    ```sh\nls\n```\n```rust\n# let hidden = 1;\n```\n";
        let examples = examples(page);
        let features: Vec<_> = examples.iter().map(|example| example.feature).collect();
        assert_eq!(features, [Some("alloc"), None]);
        assert!(examples[0].program().contains("let b = B?;\nOk(())\n}"));
        assert!(examples[1].program().contains("\nlet hidden = 1;\n"));
    }

    #[test]
    fn a_manifest_asks_for_the_feature_and_nothing_else() {
        let text = manifest("slab-core", "slab-core-0.1.0", None);
        assert!(text.ends_with("features = [] }\n"), "{text}");
        let text = manifest("slab-core", "slab-core-0.1.0", Some("alloc"));
        assert!(text.ends_with("features = [\"alloc\"] }\n"), "{text}");
    }
}
