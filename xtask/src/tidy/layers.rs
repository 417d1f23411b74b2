//! Dependencies point down only.
//!
//! The table below is the layer rule of `docs/ARCHITECTURE.md`. A crate that
//! is not in it is a problem, so a new crate has to be given its place.

use crate::workspace::Metadata;

/// A crate of the workspace and the crates of it that it may be built from.
const LAYERS: &[(&str, &[&str])] = &[
    ("slab-core", &[]),
    ("slab-memory", &["slab-core"]),
    ("mooncake-sys", &[]),
    (
        "mooncake-transport",
        &["slab-core", "slab-memory", "mooncake-sys"],
    ),
    ("slab-cuda", &["slab-core", "slab-memory"]),
    (
        "ec-connector",
        &[
            "slab-core",
            "slab-memory",
            "slab-cuda",
            "mooncake-transport",
        ],
    ),
    // Unpublished: the C interface over the native engine, oracles, models and this program.
    (
        "mooncake-capi",
        &["slab-memory", "mooncake-sys", "mooncake-transport"],
    ),
    ("cuda-fake", &[]),
    (
        "gpu-check",
        &[
            "slab-core",
            "slab-memory",
            "slab-cuda",
            "mooncake-transport",
            "ec-connector",
        ],
    ),
    ("slab-model", &["slab-core"]),
    ("slab-bench", &["slab-core"]),
    ("slab-loom", &["slab-core"]),
    ("slab-static", &["slab-core"]),
    ("xtask", &[]),
];

/// What tests may use on top of the layer rule.
const TEST_ONLY: &[&str] = &["slab-model", "cuda-fake"];

/// What the tests of one crate may use besides: device slabs are tried with the engine that they are for.
const TEST_PAIRS: &[(&str, &str)] = &[("slab-cuda", "mooncake-transport")];

/// The pure layer stays small: storage, and nothing that reaches outside.
const CORE_EXTERNAL: &[&str] = &["hashbrown", "heapless"];

/// The condition of what only a build of the loom models depends on.
const MODELS_ONLY: &str = "cfg(slab_loom)";

/// A dependency of a workspace member.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    pub(super) from: String,
    pub(super) to: String,
    /// Whether `to` is part of this workspace.
    pub(super) is_member: bool,
    /// Whether only tests and examples see it.
    pub(super) is_dev: bool,
}

pub(super) fn edges(metadata: &Metadata) -> Vec<Edge> {
    let mut edges = Vec::new();
    for package in metadata.members() {
        for dependency in &package.dependencies {
            // Only the build that explores models has these.
            if dependency.target.as_deref() == Some(MODELS_ONLY) {
                continue;
            }
            edges.push(Edge {
                from: package.name.clone(),
                to: dependency.name.clone(),
                is_member: dependency.path.is_some(),
                is_dev: dependency.kind.as_deref() == Some("dev"),
            });
        }
    }
    edges
}

pub(super) fn check(edges: &[Edge]) -> Vec<String> {
    let mut problems = Vec::new();
    for edge in edges {
        let Edge {
            from,
            to,
            is_member,
            is_dev,
        } = edge;
        let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| name == from) else {
            problems.push(format!("layers: `{from}` has no place in the layer table"));
            continue;
        };
        let allowed = if *is_member {
            allowed.contains(&to.as_str())
                // A crate asks for features of its own where its tests need them.
                || (*is_dev
                    && (from == to
                        || TEST_ONLY.contains(&to.as_str())
                        || TEST_PAIRS.contains(&(from, to))))
        } else {
            from != "slab-core" || *is_dev || CORE_EXTERNAL.contains(&to.as_str())
        };
        if !allowed {
            problems.push(format!("layers: `{from}` may not depend on `{to}`"));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_edge(from: &str, to: &str, is_member: bool, is_dev: bool) -> usize {
        check(&[Edge {
            from: from.to_owned(),
            to: to.to_owned(),
            is_member,
            is_dev,
        }])
        .len()
    }

    #[test]
    fn downward_dependencies_pass() {
        assert_eq!(check_edge("ec-connector", "slab-core", true, false), 0);
        assert_eq!(
            check_edge("mooncake-transport", "slab-memory", true, false),
            0
        );
        assert_eq!(check_edge("slab-core", "hashbrown", false, false), 0);
        assert_eq!(check_edge("mooncake-transport", "mio", false, false), 0);
    }

    #[test]
    fn upward_and_sideways_dependencies_are_found() {
        assert_eq!(check_edge("slab-core", "slab-memory", true, false), 1);
        assert_eq!(
            check_edge("slab-memory", "mooncake-transport", true, false),
            1
        );
        assert_eq!(
            check_edge("mooncake-transport", "ec-connector", true, true),
            1
        );
    }

    #[test]
    fn the_core_depends_on_storage_only() {
        assert_eq!(check_edge("slab-core", "rustix", false, false), 1);
        assert_eq!(check_edge("slab-core", "proptest", false, true), 0);
    }

    #[test]
    fn oracles_are_for_tests() {
        assert_eq!(check_edge("slab-core", "slab-model", true, true), 0);
        assert_eq!(check_edge("slab-core", "slab-core", true, true), 0);
        assert_eq!(check_edge("slab-core", "slab-model", true, false), 1);
    }

    #[test]
    fn device_slabs_and_engines_meet_in_tests_alone() {
        assert_eq!(check_edge("slab-cuda", "mooncake-transport", true, true), 0);
        assert_eq!(
            check_edge("slab-cuda", "mooncake-transport", true, false),
            1
        );
        assert_eq!(check_edge("mooncake-transport", "slab-cuda", true, true), 1);
        assert_eq!(check_edge("slab-cuda", "cuda-fake", true, true), 0);
        assert_eq!(check_edge("slab-cuda", "cuda-fake", true, false), 1);
    }

    #[test]
    fn a_crate_without_a_place_is_found() {
        assert_eq!(check_edge("newcomer", "serde", false, false), 1);
    }
}
