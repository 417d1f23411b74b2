//! `docs/COVERAGE.md`: which test holds which rule.
//!
//! A table row is `| id | rule | tests |`. The last cell names tests in back
//! quotes as `package/target::path::name`, or says in words why there is none:
//! it then begins with `not yet` or `cannot arise`. In the sources a comment
//! `// row: ID, ID` directly above a test says the same from the other side.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{read_text, tracked_files};
use crate::report::{Outcome, Run};

const TABLE: &str = "docs/COVERAGE.md";

/// A test that a comment ties to a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Mark {
    id: String,
    package: String,
    /// Of the integration test, or none for a unit test.
    target: Option<String>,
    function: String,
    place: String,
}

pub(super) fn check(root: &Path, run: &Run) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    if !run.complete {
        problems.push("coverage: the last run left targets out; run `cargo xtask test`".to_owned());
    }
    let table = read_text(root, Path::new(TABLE))?.unwrap_or_default();
    problems.extend(check_table(&table, run));
    problems.extend(check_marks(&table, &marks(root)?, run));
    Ok(problems)
}

/// A row of the table.
struct Row<'a> {
    id: &'a str,
    tests: &'a str,
}

fn rows(table: &str) -> impl Iterator<Item = Row<'_>> {
    table.lines().filter_map(|line| {
        // The rule may quote a pipe as `\|`; the id and the tests never do.
        let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
        let (id, rest) = inner.split_once('|')?;
        let (_, tests) = rest.rsplit_once('|')?;
        let id = id.trim();
        let is_row = !id.is_empty() && !id.starts_with('-') && id != "id";
        is_row.then_some(Row {
            id,
            tests: tests.trim(),
        })
    })
}

/// The names in back quotes.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn check_table(table: &str, run: &Run) -> Vec<String> {
    let outcomes: BTreeMap<String, Outcome> = run
        .tests
        .iter()
        .map(|test| (test.path(), test.outcome))
        .collect();
    let mut problems = Vec::new();
    let mut ids = BTreeSet::new();
    for Row { id, tests } in rows(table) {
        if !ids.insert(id) {
            problems.push(format!("coverage: {id} has two rows"));
        }
        if tests.starts_with("not yet") || tests.starts_with("cannot arise") {
            continue;
        }
        if names(tests).next().is_none() {
            problems.push(format!("coverage: {id} names no test and does not say why"));
        }
        for name in names(tests) {
            match outcomes.get(name) {
                Some(Outcome::Passed) => {}
                Some(_) => problems.push(format!("coverage: {id}: `{name}` did not pass")),
                None => problems.push(format!("coverage: {id}: the last run has no `{name}`")),
            }
        }
    }
    if ids.is_empty() {
        problems.push(format!("coverage: {TABLE} has no rows"));
    }
    problems
}

fn check_marks(table: &str, marks: &[Mark], run: &Run) -> Vec<String> {
    let cells: BTreeMap<&str, &str> = rows(table).map(|row| (row.id, row.tests)).collect();
    let mut problems = Vec::new();
    for mark in marks {
        let Mark { id, place, .. } = mark;
        let Some(cell) = cells.get(id.as_str()) else {
            problems.push(format!(
                "coverage: {place} marks {id}, which {TABLE} does not have"
            ));
            continue;
        };
        let tests = run_names(mark, run);
        if tests.is_empty() {
            problems.push(format!(
                "coverage: {place}: the last run has no `{}`",
                mark.function
            ));
        }
        for test in tests {
            if !names(cell).any(|name| name == test) {
                problems.push(format!(
                    "coverage: {id} does not name `{test}` ({place}); run `cargo xtask coverage`"
                ));
            }
        }
    }
    problems
}

/// The tests of the run that a mark stands for.
fn run_names(mark: &Mark, run: &Run) -> Vec<String> {
    run.tests
        .iter()
        .filter(|test| test.package == mark.package)
        .filter(|test| {
            mark.target
                .as_ref()
                .is_none_or(|target| *target == test.target)
        })
        .filter(|test| test.name.rsplit("::").next() == Some(mark.function.as_str()))
        .map(|test| test.path())
        .collect()
}

/// All row comments of the sources.
fn marks(root: &Path) -> Result<Vec<Mark>> {
    let mut marks = Vec::new();
    for file in tracked_files(root)? {
        if file.extension().is_some_and(|extension| extension == "rs")
            && let Some(text) = read_text(root, &file)?
        {
            marks.extend(marks_of(&file, &text));
        }
    }
    Ok(marks)
}

fn marks_of(file: &Path, text: &str) -> Vec<Mark> {
    let Some((package, target)) = place_of(file) else {
        return Vec::new();
    };
    let mut marks = Vec::new();
    let mut waiting: Vec<(String, String)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(ids) = line.strip_prefix("// row: ") {
            let place = format!("{}:{}", file.display(), index + 1);
            // A remark may follow the ids after a dash or in brackets.
            let ids = ids.split([';', '(']).next().unwrap_or_default();
            for id in ids.split([',', ' ']).filter(|id| !id.is_empty()) {
                waiting.push((id.to_owned(), place.clone()));
            }
        } else if let Some(function) = function_name(line) {
            for (id, place) in waiting.drain(..) {
                marks.push(Mark {
                    id,
                    package: package.clone(),
                    target: target.clone(),
                    function: function.to_owned(),
                    place,
                });
            }
        }
    }
    // A comment above nothing must not vanish.
    for (id, place) in waiting {
        marks.push(Mark {
            id,
            package: package.clone(),
            target: target.clone(),
            function: "(nothing)".to_owned(),
            place,
        });
    }
    marks
}

fn function_name(line: &str) -> Option<&str> {
    let rest = line
        .strip_prefix("pub(crate) ")
        .unwrap_or(line)
        .strip_prefix("fn ")?;
    rest.split(['(', '<']).next()
}

/// The package and, for an integration test, the target of a source file.
fn place_of(file: &Path) -> Option<(String, Option<String>)> {
    let parts: Vec<_> = file
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    match parts
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["crates", package, "tests", name] => Some((
            (*package).to_owned(),
            Some(name.trim_end_matches(".rs").to_owned()),
        )),
        // A module of some integration test; the function name decides.
        ["crates", package, "tests" | "src", ..] => Some(((*package).to_owned(), None)),
        ["xtask", "src", ..] => Some(("xtask".to_owned(), None)),
        _ => None,
    }
}

/// Adds to the table what the comments say and it does not; returns how many
/// tests were added.
pub(crate) fn update(root: &Path, run: &Run) -> Result<usize> {
    let file: PathBuf = root.join(TABLE);
    let table = std::fs::read_to_string(&file)
        .with_context(|| format!("cannot read {}", file.display()))?;
    let (table, added) = updated(&table, &marks(root)?, run);
    std::fs::write(&file, table)?;
    Ok(added)
}

fn updated(table: &str, marks: &[Mark], run: &Run) -> (String, usize) {
    let known: BTreeSet<String> = run.tests.iter().map(|test| test.path()).collect();
    let mut added = 0;
    let mut out = String::with_capacity(table.len());
    for line in table.lines() {
        let Some(row) = rows(line).next() else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        // What the run no longer has is dropped: it was renamed or removed.
        let mut tests: Vec<String> = names(row.tests)
            .filter(|name| known.contains(*name))
            .map(str::to_owned)
            .collect();
        let before = tests.len();
        for mark in marks.iter().filter(|mark| mark.id == row.id) {
            for test in run_names(mark, run) {
                if !tests.contains(&test) {
                    tests.push(test);
                }
            }
        }
        added += tests.len() - before;
        if tests.is_empty() {
            out.push_str(line);
        } else {
            let cell: Vec<String> = tests.iter().map(|test| format!("`{test}`")).collect();
            let head = line.trim_end().trim_end_matches('|');
            let head = head.rsplit_once('|').map_or(head, |(head, _)| head);
            out.push_str(&format!("{head}| {} |", cell.join(", ")));
        }
        out.push('\n');
    }
    (out, added)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Entry, Kind};

    const HEAD: &str = "# Title\n\n| id | rule | tests |\n| --- | --- | --- |\n";

    fn run(tests: &[(&str, &str, &str, Outcome)]) -> Run {
        let entry = |(package, target, name, outcome): &(&str, &str, &str, Outcome)| Entry {
            package: (*package).to_owned(),
            target: (*target).to_owned(),
            name: (*name).to_owned(),
            kind: Kind::of(target, name),
            outcome: *outcome,
            class: None,
        };
        Run {
            complete: true,
            tests: tests.iter().map(entry).collect(),
        }
    }

    fn table_problems(row: &str, outcome: Outcome) -> usize {
        check_table(
            &format!("{HEAD}{row}\n"),
            &run(&[("p", "lib", "a::b", outcome)]),
        )
        .len()
    }

    #[test]
    fn a_row_with_a_passed_test_or_a_reason_is_good() {
        assert_eq!(
            table_problems("| A1 | rule | `p/lib::a::b` |", Outcome::Passed),
            0
        );
        assert_eq!(
            table_problems("| A1 | a \\| b | not yet: write windows |", Outcome::Passed),
            0
        );
        assert_eq!(
            table_problems("| A1 | rule | cannot arise: types |", Outcome::Passed),
            0
        );
    }

    #[test]
    fn a_missing_an_unrun_and_an_unnamed_test_are_found() {
        assert_eq!(
            table_problems("| A1 | rule | `p/lib::gone` |", Outcome::Passed),
            1
        );
        assert_eq!(
            table_problems("| A1 | rule | `p/lib::a::b` |", Outcome::Ignored),
            1
        );
        assert_eq!(table_problems("| A1 | rule | |", Outcome::Passed), 1);
        assert_eq!(
            table_problems("| A1 | rule | surely tested |", Outcome::Passed),
            1
        );
        let twice = "| A1 | r | `p/lib::a::b` |\n| A1 | s | `p/lib::a::b` |";
        assert_eq!(table_problems(twice, Outcome::Passed), 1);
        assert_eq!(check_table("no table", &run(&[])).len(), 1);
    }

    fn marked(text: &str, row: &str) -> Vec<String> {
        let marks = marks_of(Path::new("crates/p/src/a.rs"), text);
        check_marks(
            &format!("{HEAD}{row}\n"),
            &marks,
            &run(&[("p", "lib", "a::b", Outcome::Passed)]),
        )
    }

    #[test]
    fn a_comment_and_its_row_agree() {
        let text = "    // row: A1, A2\n    #[test]\n    fn b() {}\n";
        let rows = "| A1 | r | `p/lib::a::b` |\n| A2 | r | `p/lib::a::b` |";
        assert_eq!(marked(text, rows), [""; 0]);
    }

    #[test]
    fn a_comment_that_the_table_does_not_know_is_found() {
        let text = "// row: A1\n#[test]\nfn b() {}\n";
        assert_eq!(
            marked(text, "| A2 | r | `p/lib::a::b` |").len(),
            1,
            "no such row"
        );
        assert_eq!(
            marked(text, "| A1 | r | `p/lib::other` |").len(),
            1,
            "not named"
        );
        assert_eq!(
            marked("// row: A1\n", "| A1 | r | x |").len(),
            1,
            "above nothing"
        );
        let renamed = "// row: A1\n#[test]\nfn c() {}\n";
        assert_eq!(
            marked(renamed, "| A1 | r | `p/lib::a::b` |").len(),
            1,
            "no such test"
        );
    }

    #[test]
    fn an_update_adds_what_is_missing_and_drops_what_is_gone() {
        let table = format!("{HEAD}| A1 | r | not yet |\n| A2 | r | `p/lib::old` |\ntext\n");
        let marks = marks_of(
            Path::new("crates/p/src/a.rs"),
            "// row: A1 A2\n#[test]\nfn b() {}\n",
        );
        let run = run(&[("p", "lib", "a::b", Outcome::Passed)]);
        let (table, added) = updated(&table, &marks, &run);
        assert_eq!(added, 2);
        assert!(table.ends_with("| A1 | r | `p/lib::a::b` |\n| A2 | r | `p/lib::a::b` |\ntext\n"));
        assert!(check_table(&table, &run).is_empty());
        assert!(check_marks(&table, &marks, &run).is_empty());
    }

    #[test]
    fn targets_come_from_the_path() {
        let place = |path: &str| place_of(Path::new(path));
        assert_eq!(
            place("crates/p/tests/rows.rs"),
            Some(("p".to_owned(), Some("rows".to_owned())))
        );
        assert_eq!(
            place("crates/p/tests/peer/harness.rs"),
            Some(("p".to_owned(), None))
        );
        assert_eq!(place("crates/p/src/lib.rs"), Some(("p".to_owned(), None)));
        assert_eq!(place("docs/x.rs"), None);
    }
}
