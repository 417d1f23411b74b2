//! What kind of screen, if any, a person looks at.

use std::io::{IsTerminal, Stdout};

/// Columns assumed when the terminal does not say, and in a pipe.
const COLUMNS: usize = 80;

/// Whether escape sequences for colours are wanted on a stream.
pub(crate) fn wants_colours(is_terminal: bool) -> bool {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    is_terminal && !no_colour && !dumb
}

/// Columns of the terminal behind `stdout`.
pub(crate) fn columns(stdout: &Stdout) -> usize {
    if !stdout.is_terminal() {
        return COLUMNS;
    }
    match rustix::termios::tcgetwinsize(stdout) {
        Ok(size) if size.ws_col > 0 => usize::from(size.ws_col),
        _ => COLUMNS,
    }
}

/// `text` with everything that could steer a terminal made visible.
///
/// Names come from files and from the network.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        // Marks that reorder text count as steering as well.
        let steers = c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if steers {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    // row: F16
    #[test]
    fn hostile_names_cannot_steer_the_terminal() {
        assert_eq!(printable("vision/blocks.0 größe"), "vision/blocks.0 größe");
        assert_eq!(
            printable("a\x1b[2Jb\r\n\u{202e}c"),
            "a\\u{1b}[2Jb\\r\\n\\u{202e}c"
        );
    }
}
