//! Text as Python writes it.

/// Quotes a text the way Python's `repr` does, cut after 128 characters.
///
/// vLLM puts `repr` of what it was sent into two error texts; the cut keeps an echo small.
pub(crate) fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut out = String::with_capacity(text.len().min(REPR_CHARS_MAX) + 2);
    out.push(quote);
    for c in text.chars().take(REPR_CHARS_MAX) {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                out.push_str(&format!("\\x{:02x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Longest echo of a text in an error, in characters.
const REPR_CHARS_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_repr(text: &str, expected: &str) {
        assert_eq!(repr(text), expected);
    }

    #[test]
    fn repr_quotes_as_python_does() {
        check_repr("zap", "'zap'");
        check_repr("", "''");
        check_repr("it's", "\"it's\"");
        check_repr("it's \"so\"", "'it\\'s \"so\"'");
        check_repr("a\\b\n\r\t\u{1}\u{7f}", "'a\\\\b\\n\\r\\t\\x01\\x7f'");
        check_repr("grün", "'grün'");
        assert_eq!(repr(&"x".repeat(1000)).len(), 130);
    }
}
