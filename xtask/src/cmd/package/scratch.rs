//! Crates of somebody else's, each of which depends on one packaged crate, with one choice of features, and runs
//! one of its examples.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::folder;
use crate::runner::Runner;
use crate::workspace::Package;

/// A packaged crate whose README is tried, and the features that its examples need unless they name another.
const READMES: &[(&str, &[&str])] = &[
    ("slab-core", &[]),
    ("slab-memory", &["std"]),
    // Where there is no CUDA driver its example says so.
    ("slab-cuda", &[]),
    ("mooncake-sys", &[]),
    ("mooncake-transport", &["tcp"]),
    ("ec-connector", &[]),
];

/// Packaged examples that stand for a feature, which is the only one they are built with.
const EXAMPLES: &[(&str, &str, &str)] = &[
    ("mooncake-transport", "named", "http"),
    ("mooncake-transport", "named", "etcd"),
    ("mooncake-transport", "named", "redis"),
    ("mooncake-transport", "pipe", "pipe"),
    ("mooncake-transport", "library", "ffi"),
];

/// Runs the examples of the packages that are unpacked below `packages`, each in a crate of its own.
pub(super) fn run(runner: &Runner, packages: &Path, published: &[&Package]) -> Result<()> {
    if runner.is_dry_run() {
        return Ok(());
    }
    // Mooncake's C interface, served by the native engine: what loads the library finds one.
    runner.run(&mut runner.cargo(&["build", "--locked", "--quiet", "-p", "mooncake-capi"]))?;
    for (name, features) in READMES {
        let package = find(published, name)?;
        let readme = read(&packages.join(folder(package)).join("README.md"))?;
        let examples = examples(&readme);
        ensure!(!examples.is_empty(), "the README of {name} has no example");
        for (number, example) in examples.iter().enumerate() {
            let named: Vec<&str> = example.feature.into_iter().collect();
            let features = if named.is_empty() { features } else { &*named };
            let scratch = Scratch {
                dir: format!("{name}-readme-{number}"),
                manifest: manifest(published, package, features),
                program: example.program(),
            };
            scratch.run(runner, packages)?;
        }
    }
    for (name, example, feature) in EXAMPLES {
        let package = find(published, name)?;
        let file = format!("examples/{example}.rs");
        let scratch = Scratch {
            dir: format!("{name}-{feature}"),
            manifest: manifest(published, package, &[feature]),
            program: read(&packages.join(folder(package)).join(file))?,
        };
        scratch.run(runner, packages)?;
    }
    Ok(())
}

fn find<'a>(published: &[&'a Package], name: &str) -> Result<&'a Package> {
    let package = published.iter().find(|package| package.name == name);
    package
        .copied()
        .with_context(|| format!("no published crate is called {name}"))
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

/// A crate outside the workspace.
struct Scratch {
    dir: String,
    manifest: String,
    program: String,
}

impl Scratch {
    fn run(&self, runner: &Runner, packages: &Path) -> Result<()> {
        let dir = runner.root().join("target/xtask/scratch").join(&self.dir);
        fs::create_dir_all(dir.join("src"))?;
        fs::write(dir.join("src/main.rs"), &self.program)?;
        fs::write(dir.join("Cargo.toml"), &self.manifest)?;
        // The versions that everything else was tested with.
        fs::copy(packages.join("Cargo.lock"), dir.join("Cargo.lock"))?;
        let mut run = runner.cargo(&["run", "--offline", "--quiet", "--manifest-path"]);
        run.arg(dir.join("Cargo.toml"))
            // What others depend on is built already.
            .arg("--target-dir")
            .arg(runner.root().join("target"))
            .env(
                "MOONCAKE_LIBRARY",
                runner.root().join("target/debug/libtransfer_engine.so"),
            );
        runner
            .run(&mut run)
            .with_context(|| format!("the scratch crate {} does not run", self.dir))
    }
}

/// Asks for `package` with these features alone, and for `slab-core` and `slab-memory`, of whose pools and memories
/// interfaces are made. Each published crate that those need is its package.
fn manifest(published: &[&Package], package: &Package, features: &[&str]) -> String {
    let name = &package.name;
    let mut text = format!(
        "[package]\nname = \"scratch\"\nedition = \"2024\"\n\n[workspace]\n\n[profile.dev]\nopt-level = 1\n\
         debug = \"line-tables-only\"\n\n[dependencies]\n\
         {name} = {{ version = \"{}\", default-features = false, features = {features:?} }}\n",
        package.version
    );
    let needed: Vec<_> = package
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind.is_none() && dependency.path.is_some())
        .map(|dependency| dependency.name.as_str())
        .collect();
    // What its interface is made of; their features are its own affair.
    for used in published.iter().filter(|used| {
        needed.contains(&used.name.as_str())
            && ["slab-core", "slab-memory", "mooncake-transport"].contains(&used.name.as_str())
    }) {
        text.push_str(&format!(
            "{} = {{ version = \"{}\", default-features = false }}\n",
            used.name, used.version
        ));
    }
    text.push_str("\n[patch.crates-io]\n");
    for package in published {
        text.push_str(&format!(
            "{} = {{ path = \"../../packages/{}\" }}\n",
            package.name,
            folder(package)
        ));
    }
    text
}

struct Example<'a> {
    lines: Vec<&'a str>,
    feature: Option<&'a str>,
}

impl Example<'_> {
    /// As rustdoc would: lines that start with `# ` are part of it, though the README's readers do not see them.
    fn program(&self) -> String {
        let lines = || {
            self.lines
                .iter()
                .map(|line| line.strip_prefix("# ").unwrap_or(line))
        };
        if lines().any(|line| line.starts_with("fn main(")) {
            return lines().map(|line| format!("{line}\n")).collect();
        }
        let mut program = String::from("fn main() -> Result<(), Box<dyn std::error::Error>> {\n");
        for line in lines().filter(|line| !line.starts_with("Ok::<")) {
            program.push_str(line);
            program.push('\n');
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
    use crate::workspace::{Dependency, Package};

    #[test]
    fn each_block_of_rust_is_an_example_with_the_feature_it_names() {
        let page = "text\n```rust\nuse a::B; // with the feature `alloc`\nlet b = B?;\n# Ok::<(), E>(())\n```\n\
                    ```sh\nls\n```\n```rust\n# let hidden = 1;\n```\n\
                    ```rust\n# fn main() -> R {\nb();\n# Ok(())\n# }\n```\n";
        let examples = examples(page);
        let features: Vec<_> = examples.iter().map(|example| example.feature).collect();
        assert_eq!(features, [Some("alloc"), None, None]);
        assert!(examples[0].program().contains("let b = B?;\nOk(())\n}"));
        assert!(examples[1].program().contains("\nlet hidden = 1;\n"));
        assert_eq!(examples[2].program(), "fn main() -> R {\nb();\nOk(())\n}\n");
    }

    #[test]
    fn a_manifest_asks_for_the_features_and_replaces_each_published_crate_by_its_package() {
        let package = |name: &str, dependencies| Package {
            id: name.to_owned(),
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            manifest_path: "Cargo.toml".into(),
            publish: None,
            targets: Vec::new(),
            license: None,
            description: None,
            dependencies,
        };
        let memory = package("slab-memory", Vec::new());
        let transport = package(
            "mooncake-transport",
            vec![Dependency {
                name: "slab-memory".to_owned(),
                kind: None,
                path: Some("crates/slab-memory".into()),
                target: None,
            }],
        );
        let text = manifest(&[&memory, &transport], &transport, &["pipe"]);
        let parts = [
            "\nmooncake-transport = { version = \"0.1.0\", default-features = false, features = [\"pipe\"] }\n",
            "\nslab-memory = { version = \"0.1.0\", default-features = false }\n",
            "[patch.crates-io]\nslab-memory = { path = \"../../packages/slab-memory-0.1.0\" }\n",
        ];
        for part in parts {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(manifest(&[&memory], &memory, &[]).contains("features = [] }\n"));
    }
}
