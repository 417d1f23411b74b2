//! The example of the README, run where there is a driver; and that it is the README's.

mod fake;

#[path = "../examples/device_pool.rs"]
mod example;

use fake::Fake;

#[test]
fn the_example_runs_to_its_end_on_a_device() {
    let fake = Fake::immediate();
    example::main().unwrap();
    assert_eq!(fake.calls(c"cuEventRecord"), 5, "four copies, and the loan");
}

/// Without the way in which lines are broken, and without what frames it.
fn tokens(code: &str) -> String {
    let lines = code
        .lines()
        .map(|line| line.split(" // ").next().unwrap_or(""));
    let code: String = lines
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split_whitespace())
        .collect();
    code.replace(",}", "}").replace(",)", ")")
}

#[test]
fn the_example_is_that_of_the_readme() {
    let readme = include_str!("../README.md");
    let (_, rest) = readme.split_once("```rust\n").expect("an example");
    let (code, _) = rest.split_once("```").expect("its end");
    let code = code.replace("# Ok::<(), Box<dyn std::error::Error>>(())", "Ok(())");
    let example = include_str!("../examples/device_pool.rs");
    let frame = "pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {";
    let (before, after) = example.split_once(frame).expect("its main");
    let (after, _) = after.rsplit_once('}').expect("the end of its main");
    assert_eq!(tokens(&code), tokens(before) + &tokens(after));
}
