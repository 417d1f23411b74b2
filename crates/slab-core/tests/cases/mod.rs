//! How many cases a property test runs.

use proptest::prelude::ProptestConfig;

/// `cases` of them, or as many as `PROPTEST_CASES` says: an interpreter has time for a few only.
///
/// A failing case becomes a named test, not a file beside the sources.
pub(crate) fn config(cases: u32) -> ProptestConfig {
    let given = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig {
        cases: given.map_or(cases, |given| given.parse().expect("a number of cases")),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
