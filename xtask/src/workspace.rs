//! The workspace as `cargo metadata` describes it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::runner::Runner;

/// The parts of `cargo metadata --format-version 1` that are used here.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) workspace_members: Vec<String>,
    pub(crate) resolve: Resolve,
}

/// The dependency graph, by package id.
#[derive(Deserialize)]
pub(crate) struct Resolve {
    pub(crate) nodes: Vec<Node>,
}

#[derive(Deserialize)]
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) deps: Vec<NodeDependency>,
}

#[derive(Deserialize)]
pub(crate) struct NodeDependency {
    pub(crate) pkg: String,
    pub(crate) dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
pub(crate) struct DependencyKind {
    pub(crate) kind: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) publish: Option<Vec<String>>,
    pub(crate) targets: Vec<Target>,
    pub(crate) license: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `dev`, `build`, or none for a normal dependency.
    pub(crate) kind: Option<String>,
    /// Set for a crate of this workspace.
    pub(crate) path: Option<PathBuf>,
    /// Where it is needed, if not everywhere.
    pub(crate) target: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
    #[serde(default)]
    pub(crate) doctest: bool,
}

impl Metadata {
    pub(crate) fn load(runner: &Runner) -> Result<Self> {
        let output = runner
            .cargo(&["metadata", "--format-version", "1", "--locked"])
            .output()?;
        if !output.status.success() {
            bail!(
                "`cargo metadata` failed:\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        serde_json::from_slice(&output.stdout).context("`cargo metadata` printed unexpected JSON")
    }

    /// The packages of this workspace, in the order of the manifest.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.workspace_members
            .iter()
            .filter_map(|id| self.package(id))
    }

    /// What the published crates are built from, themselves left out.
    pub(crate) fn product_dependencies(&self) -> Vec<&Package> {
        let mut waiting: Vec<&str> = self
            .members()
            .filter(|p| p.is_published())
            .map(|p| p.id.as_str())
            .collect();
        let mut seen: BTreeSet<&str> = waiting.iter().copied().collect();
        while let Some(id) = waiting.pop() {
            let node = self.resolve.nodes.iter().find(|node| node.id == id);
            for dependency in node.iter().flat_map(|node| &node.deps) {
                let is_built = dependency
                    .dep_kinds
                    .iter()
                    .any(|kind| kind.kind.as_deref() != Some("dev"));
                if is_built && seen.insert(&dependency.pkg) {
                    waiting.push(&dependency.pkg);
                }
            }
        }
        seen.into_iter()
            .filter(|id| !self.workspace_members.iter().any(|member| member == id))
            .filter_map(|id| self.package(id))
            .collect()
    }

    pub(crate) fn package(&self, id: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.id == id)
    }
}

impl Package {
    /// Whether it may be published.
    pub(crate) fn is_published(&self) -> bool {
        self.publish
            .as_ref()
            .is_none_or(|registries| !registries.is_empty())
    }
}

/// Feature combinations that the workspace build does not cover: building the
/// workspace joins the features that its members ask of one another.
pub(crate) const FEATURE_SETS: &[&[&str]] = &[
    &["slab-core", "--no-default-features"],
    &["slab-core", "--no-default-features", "--features", "alloc"],
    &["slab-core", "--no-default-features", "--features", "std"],
    &["slab-memory", "--no-default-features"],
    &["slab-memory", "--no-default-features", "--features", "std"],
    &["mooncake-transport", "--no-default-features"],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "tcp",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "http",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "etcd",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "redis",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "pipe",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "ffi",
    ],
    &["mooncake-transport", "--all-features"],
    &["ec-connector", "--no-default-features"],
    &["ec-connector", "--features", "cuda"],
];
