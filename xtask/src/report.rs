//! The result of a test run: what ran, of which kind, with which outcome.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// What a test shows, told by its name; `docs/TESTING.md` explains the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    Unit,
    Property,
    RealInput,
    RealPeer,
    Doc,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] = [
        Self::Unit,
        Self::Property,
        Self::RealInput,
        Self::RealPeer,
        Self::Doc,
    ];

    /// The kind of the test `name` in the target `target`.
    pub(crate) fn of(target: &str, name: &str) -> Self {
        let function = name.rsplit("::").next().unwrap_or(name);
        if target == DOC_TARGET {
            Self::Doc
        } else if target.starts_with("real_peer_") {
            Self::RealPeer
        } else if target.starts_with("real_input_") {
            Self::RealInput
        } else if target.starts_with("property_") || function.starts_with("property_") {
            Self::Property
        } else {
            Self::Unit
        }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Property => "property",
            Self::RealInput => "real input",
            Self::RealPeer => "real peer",
            Self::Doc => "doc",
        }
    }
}

/// The name under which doc tests are listed as a target.
pub(crate) const DOC_TARGET: &str = "doc";
/// The name under which the unit tests of a library are listed as a target.
pub(crate) const LIB_TARGET: &str = "lib";

/// Why a test is ignored: the first word of its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Class {
    /// Needs packages that `cargo xtask fixture` downloads.
    NeedsNetwork,
    /// Needs libraries or servers that `cargo xtask fixture` downloads from Debian.
    NeedsDebian,
    NeedsGpu,
    NeedsComponent,
    /// Any other reason, or none.
    Unclassed,
}

impl Class {
    pub(crate) const ALL: [Self; 5] = [
        Self::NeedsNetwork,
        Self::NeedsDebian,
        Self::NeedsGpu,
        Self::NeedsComponent,
        Self::Unclassed,
    ];

    pub(crate) fn of(reason: &str) -> Self {
        let word = reason.split([':', ' ', ',']).next().unwrap_or_default();
        Self::ALL
            .into_iter()
            .find(|class| class.label() == word)
            .unwrap_or(Self::Unclassed)
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::NeedsNetwork => "needs-network",
            Self::NeedsDebian => "needs-debian",
            Self::NeedsGpu => "needs-gpu",
            Self::NeedsComponent => "needs-component",
            Self::Unclassed => "no class",
        }
    }

    /// Whether a test of this class may stay out of a run. What the fixture
    /// provides must run where `strict` (in CI); a test that nobody knows how
    /// to run is never accepted.
    pub(crate) fn may_be_skipped(self, strict: bool) -> bool {
        match self {
            Self::NeedsNetwork | Self::NeedsDebian => !strict,
            Self::NeedsGpu | Self::NeedsComponent => true,
            Self::Unclassed => false,
        }
    }
}

/// A command that could not run here, as part of what it is or whole.
#[derive(Debug)]
pub(crate) struct NotRun {
    pub(crate) what: String,
    pub(crate) class: Class,
    pub(crate) why: String,
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, class, why } = self;
        write!(f, "ignored ({}): {what}: {why}", class.label())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Ignored,
}

/// One test of the run. A target that died or hung without saying which of its
/// tests was the cause is a failed entry of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) package: String,
    /// `lib`, `doc`, or the name of the binary or integration test.
    pub(crate) target: String,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) outcome: Outcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) class: Option<Class>,
}

impl Entry {
    /// The form in which documents name a test: `package/target::path::name`.
    pub(crate) fn path(&self) -> String {
        format!("{}/{}::{}", self.package, self.target, self.name)
    }
}

/// A run as it is kept in `target/xtask/last-run.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Whether every target of the workspace was asked to run.
    pub(crate) complete: bool,
    pub(crate) tests: Vec<Entry>,
}

impl Run {
    pub(crate) fn file(root: &Path) -> PathBuf {
        root.join("target/xtask/last-run.json")
    }

    pub(crate) fn save(&self, root: &Path) -> Result<()> {
        let file = Self::file(root);
        if let Some(parent) = file.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&file, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("cannot write {}", file.display()))
    }

    pub(crate) fn load(root: &Path) -> Result<Self> {
        let file = Self::file(root);
        let text = std::fs::read(&file)
            .with_context(|| format!("no {}: run `cargo xtask test` first", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is not readable", file.display()))
    }

    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.tests
            .iter()
            .filter(|test| test.outcome == outcome)
            .count()
    }

    /// What makes the run a failure, one line each; empty if it is a success.
    pub(crate) fn problems(&self, strict: bool) -> Vec<String> {
        let mut problems = Vec::new();
        for test in &self.tests {
            match (test.outcome, test.class) {
                (Outcome::Failed, _) => problems.push(format!("failed: {}", test.path())),
                (Outcome::Ignored, Some(class)) if !class.may_be_skipped(strict) => {
                    problems.push(format!("not run ({}): {}", class.label(), test.path()));
                }
                _ => {}
            }
        }
        if self.count(Outcome::Passed) == 0 {
            problems.push("no test ran".to_owned());
        }
        problems
    }

    /// The table at the end of a run.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let mut packages: Vec<&str> = self.tests.iter().map(|t| t.package.as_str()).collect();
        packages.sort_unstable();
        packages.dedup();
        self.rows(
            &mut text,
            "package",
            packages.iter().map(|p| (*p, *p)),
            |t| t.package.as_str(),
        );
        text.push('\n');
        let kinds = Kind::ALL.map(|kind| (kind.label(), kind));
        self.rows(&mut text, "kind", kinds.into_iter(), |t| t.kind);
        for class in Class::ALL {
            let ignored: Vec<_> = self
                .tests
                .iter()
                .filter(|t| t.class == Some(class))
                .collect();
            if !ignored.is_empty() {
                let _ = writeln!(text, "\nignored, {} ({}):", class.label(), ignored.len());
                for test in ignored {
                    let _ = writeln!(text, "  {}", test.path());
                }
            }
        }
        text
    }

    /// A row for each group of tests.
    fn rows<'a, G: PartialEq>(
        &'a self,
        text: &mut String,
        title: &str,
        groups: impl Iterator<Item = (&'a str, G)>,
        group_of: impl Fn(&'a Entry) -> G,
    ) {
        let _ = writeln!(
            text,
            "{title:<18} {:>7} {:>7} {:>8}",
            "passed", "failed", "ignored"
        );
        for (label, group) in groups {
            let tests: Vec<_> = self
                .tests
                .iter()
                .filter(|test| group_of(test) == group)
                .collect();
            let count = |outcome| tests.iter().filter(|test| test.outcome == outcome).count();
            let _ = writeln!(
                text,
                "{label:<18} {:>7} {:>7} {:>8}",
                count(Outcome::Passed),
                count(Outcome::Failed),
                count(Outcome::Ignored)
            );
        }
    }

    /// The plain closing line.
    pub(crate) fn closing_line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.count(Outcome::Passed),
            self.count(Outcome::Failed),
            self.count(Outcome::Ignored)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(target: &str, name: &str, outcome: Outcome, class: Option<Class>) -> Entry {
        Entry {
            package: "p".to_owned(),
            target: target.to_owned(),
            name: name.to_owned(),
            kind: Kind::of(target, name),
            outcome,
            class,
        }
    }

    #[test]
    fn kinds_follow_the_naming_rule() {
        assert_eq!(Kind::of("lib", "pool::tests::frees"), Kind::Unit);
        assert_eq!(
            Kind::of("lib", "pool::tests::property_bytes"),
            Kind::Property
        );
        assert_eq!(Kind::of("property_pool", "any_order"), Kind::Property);
        assert_eq!(Kind::of("real_peer_matrix", "property_x"), Kind::RealPeer);
        assert_eq!(Kind::of("real_input_push", "a"), Kind::RealInput);
        assert_eq!(Kind::of("rows", "a"), Kind::Unit);
        assert_eq!(Kind::of("doc", "src/lib.rs - (line 1)"), Kind::Doc);
    }

    #[test]
    fn the_table_has_a_row_for_each_package_and_kind() {
        let mut run = Run {
            complete: true,
            tests: vec![
                entry("lib", "a", Outcome::Passed, None),
                entry("lib", "property_b", Outcome::Failed, None),
            ],
        };
        run.tests.push(Entry {
            package: "q".to_owned(),
            ..entry("lib", "c", Outcome::Passed, None)
        });
        let table = run.table();
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        for row in [["p", "1", "1", "0"], ["q", "1", "0", "0"]] {
            assert!(rows.contains(&row.to_vec()), "{table}");
        }
        for row in [["unit", "2", "0", "0"], ["property", "0", "1", "0"]] {
            assert!(rows.contains(&row.to_vec()), "{table}");
        }
    }

    #[test]
    fn classes_are_the_first_word_of_the_reason() {
        assert_eq!(Class::of("needs-network: the wheel"), Class::NeedsNetwork);
        assert_eq!(Class::of("needs-debian"), Class::NeedsDebian);
        assert_eq!(Class::of("slow"), Class::Unclassed);
        assert_eq!(Class::of(""), Class::Unclassed);
    }

    #[test]
    fn a_failure_and_an_empty_run_are_problems() {
        let empty = Run::default();
        assert_eq!(empty.problems(false), ["no test ran"]);
        let failed = Run {
            complete: true,
            tests: vec![
                entry("lib", "a", Outcome::Passed, None),
                entry("lib", "b", Outcome::Failed, None),
            ],
        };
        assert_eq!(failed.problems(false), ["failed: p/lib::b"]);
        assert_eq!(failed.closing_line(), "1 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn what_the_fixture_provides_must_run_in_ci() {
        let problems = |class, strict| {
            let ignored = entry("lib", "b", Outcome::Ignored, Some(class));
            let passed = entry("lib", "a", Outcome::Passed, None);
            Run {
                complete: true,
                tests: vec![passed, ignored],
            }
            .problems(strict)
            .len()
        };
        assert_eq!(problems(Class::NeedsNetwork, false), 0);
        assert_eq!(problems(Class::NeedsNetwork, true), 1);
        assert_eq!(problems(Class::NeedsDebian, true), 1);
        assert_eq!(problems(Class::NeedsGpu, true), 0);
        assert_eq!(problems(Class::NeedsComponent, true), 0);
        assert_eq!(problems(Class::Unclassed, false), 1);
    }
}
