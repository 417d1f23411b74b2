//! Reads what a libtest binary prints in its stable, human format.
//!
//! The closing `test result:` line is the check on the rest: where its counts
//! differ from the lines read, or where it is missing, the output is refused,
//! so that a failure cannot get lost in the reading.

use anyhow::{Context, Result, bail};

/// One test and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// With the reason given in `#[ignore = ".."]`, which may be empty.
    Ignored(String),
}

/// All tests of one or more consecutive runs in `output`. What passing tests have printed is not looked at, if there is
/// only one run with `--show-output`.
pub(crate) fn parse(output: &str) -> Result<Vec<Test>> {
    let output = without_successes(output);
    let mut tests = Vec::new();
    let mut block_start = 0;
    let mut results = 0;
    for line in output.lines() {
        if let Some(test) = parse_test(line) {
            tests.push(test);
        } else if let Some(result) = line.trim_end().strip_prefix("test result: ") {
            check_counts(result, &tests[block_start..])?;
            block_start = tests.len();
            results += 1;
        }
    }
    if results == 0 {
        bail!("the output has no `test result:` line");
    }
    if block_start != tests.len() {
        bail!("the last run in the output has no `test result:` line");
    }
    Ok(tests)
}

/// What tests have counted: the name of each, and a line that it printed after `counted: `. They are in the output of
/// a run with `--show-output`.
pub(crate) fn counts(output: &str) -> Vec<(&str, &str)> {
    let mut test = None;
    let mut counts = Vec::new();
    for line in output.lines() {
        if let Some(name) = heading(line) {
            test = Some(name);
        } else if let (Some(test), Some(text)) = (test, line.strip_prefix("counted: ")) {
            counts.push((test, text));
        }
    }
    counts
}

/// The name in the heading of what a test has printed.
fn heading(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// The output without what the tests that passed have printed, which stands before that of those that failed.
pub(crate) fn without_successes(output: &str) -> String {
    let Some((before, rest)) = output.split_once("\nsuccesses:\n") else {
        return output.to_owned();
    };
    let rest = match rest.rfind("\nfailures:\n\n----") {
        Some(at) => &rest[at..],
        None => rest.rfind("\ntest result: ").map_or("", |at| &rest[at..]),
    };
    format!("{before}{rest}")
}

fn parse_test(line: &str) -> Option<Test> {
    let rest = line.strip_prefix("test ")?;
    let (name, outcome) = rest.split_once(" ... ")?;
    let outcome = outcome.trim_end();
    let outcome = if let Some(reason) = outcome.strip_prefix("ignored") {
        Outcome::Ignored(reason.trim_start_matches([',', ' ']).to_owned())
    } else if outcome == "ok" {
        Outcome::Passed
    } else if outcome.starts_with("FAILED") {
        Outcome::Failed
    } else {
        return None;
    };
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    Some(Test {
        name: name.to_owned(),
        outcome,
    })
}

/// Compares `ok. 3 passed; 0 failed; 1 ignored; …` with the lines above it.
fn check_counts(result: &str, tests: &[Test]) -> Result<()> {
    let count = |word: &str| -> Result<usize> {
        result
            .split([';', '.'])
            .find_map(|part| part.trim().strip_suffix(word))
            .with_context(|| format!("no count of `{}` in `{result}`", word.trim()))?
            .trim()
            .parse()
            .with_context(|| format!("no number in `{result}`"))
    };
    let seen = |wanted: fn(&Outcome) -> bool| tests.iter().filter(|t| wanted(&t.outcome)).count();
    let counted = [
        (count(" passed")?, seen(|o| matches!(o, Outcome::Passed))),
        (count(" failed")?, seen(|o| matches!(o, Outcome::Failed))),
        (
            count(" ignored")?,
            seen(|o| matches!(o, Outcome::Ignored(_))),
        ),
    ];
    if counted.iter().any(|(said, seen)| said != seen) {
        bail!("the result line says `{result}`, but the lines above it say otherwise");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(output: &str, expected: &[(&str, Outcome)]) {
        let tests = parse(output).unwrap();
        let tests: Vec<_> = tests
            .iter()
            .map(|t| (t.name.as_str(), t.outcome.clone()))
            .collect();
        assert_eq!(tests, expected);
    }

    #[test]
    fn reads_every_kind_of_line() {
        check(
            "\nrunning 5 tests\n\
             test a::one ... ok\n\
             test a::two - should panic ... ok\n\
             test b has been running for over 60 seconds\n\
             test b ... FAILED\n\
             test c ... ignored, needs-gpu: a device\n\
             test d ... ignored\n\
             \nfailures:\n\n---- b stdout ----\nassertion failed\n\n\
             test result: FAILED. 2 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
            &[
                ("a::one", Outcome::Passed),
                ("a::two", Outcome::Passed),
                ("b", Outcome::Failed),
                ("c", Outcome::Ignored("needs-gpu: a device".to_owned())),
                ("d", Outcome::Ignored(String::new())),
            ],
        );
    }

    #[test]
    fn doc_tests_keep_their_line_and_their_kind() {
        check(
            "running 1 test\n\
             test src/lib.rs - Token (line 5) - compile fail ... ok\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
             running 1 test\n\
             test src/lib.rs - (line 9) ... ok\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n",
            &[
                (
                    "src/lib.rs - Token (line 5) - compile fail",
                    Outcome::Passed,
                ),
                ("src/lib.rs - (line 9)", Outcome::Passed),
            ],
        );
    }

    #[test]
    fn what_tests_have_counted_is_found_by_their_names() {
        let output = "test a ... ok\ncounted: by nobody\n\nsuccesses:\n\n---- m::a stdout ----\n\
                      noise\ncounted: 3 lists\ncounted: 4 errors\n\n---- b stdout ----\n counted: no\n";
        assert_eq!(counts(output), [("m::a", "3 lists"), ("m::a", "4 errors")]);
    }

    #[test]
    fn what_a_passing_test_has_printed_is_not_taken_for_results() {
        check(
            "test a ... ok\n\nsuccesses:\n\n---- a stdout ----\ntest x ... FAILED\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored\n\n\nsuccesses:\n    a\n\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
            &[("a", Outcome::Passed)],
        );
    }

    #[test]
    fn what_passed_is_left_out_where_something_failed() {
        let head = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n";
        let passed = "\nsuccesses:\n\n---- a stdout ----\nlong\n\n\nsuccesses:\n    a\n";
        let failed = "\nfailures:\n\n---- b stdout ----\nwhy\n\n\nfailures:\n    b\n";
        let result = "\ntest result: FAILED. 1 passed; 1 failed; 0 ignored\n";
        assert_eq!(
            without_successes(&format!("{head}{passed}{failed}{result}")),
            format!("{head}{failed}{result}")
        );
        assert_eq!(
            without_successes(&format!("{head}{passed}{result}")),
            format!("{head}{result}")
        );
        assert_eq!(without_successes(head), head);
    }

    #[test]
    fn a_line_lost_in_other_output_is_noticed() {
        let error = parse(
            "test a ... ok\nnoise test b ... FAILED\n\
             test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert!(error.unwrap_err().to_string().contains("say otherwise"));
    }

    #[test]
    fn an_abort_in_the_middle_is_noticed() {
        assert!(parse("running 2 tests\ntest a ... ok\n").is_err());
        assert!(parse("").is_err());
        assert!(
            parse(
                "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n\
                 test a ... ok\n"
            )
            .is_err()
        );
    }
}
