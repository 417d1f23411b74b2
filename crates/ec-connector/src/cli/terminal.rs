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

/// Columns that a character takes: two in the scripts and symbols that terminals draw double.
fn width(c: char) -> usize {
    let is_wide = matches!(u32::from(c),
        0x1100..=0x115F | 0x2E80..=0xA4CF | 0xAC00..=0xD7A3 | 0xF900..=0xFAFF | 0xFE30..=0xFE6F | 0xFF00..=0xFF60
        | 0xFFE0..=0xFFE6 | 0x1F300..=0x1FAFF | 0x20000..=0x3FFFD);
    if is_wide { 2 } else { 1 }
}

/// As many of `chars` as fit `columns`.
fn fitting(chars: impl Iterator<Item = char>, columns: usize) -> Vec<char> {
    let mut left = columns;
    chars
        .map_while(|c| {
            left = left.checked_sub(width(c))?;
            Some(c)
        })
        .collect()
}

/// `text` in at most `columns` columns: its middle gives way to an ellipsis.
pub(crate) fn shorten(text: &str, columns: usize) -> String {
    if text.chars().map(width).sum::<usize>() <= columns {
        return text.to_owned();
    }
    let kept = columns.saturating_sub(1);
    let tail = fitting(text.chars().rev(), kept / 2);
    let head = fitting(text.chars(), kept - kept / 2);
    head.into_iter()
        .chain(['\u{2026}'])
        .chain(tail.into_iter().rev())
        .collect()
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

    #[test]
    fn long_text_is_shortened_in_the_middle_between_characters() {
        assert_eq!(shorten("abcdef", 6), "abcdef");
        assert_eq!(shorten("abcdef", 5), "ab\u{2026}ef");
        assert_eq!(shorten("äöüßéè", 4), "äö\u{2026}è");
        assert_eq!(shorten("abcdef", 1), "\u{2026}");
        assert_eq!(shorten("日本語", 6), "日本語");
        assert_eq!(shorten("日本語", 5), "日\u{2026}語");
        assert_eq!(shorten("日本語x", 4), "日\u{2026}x");
    }

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
