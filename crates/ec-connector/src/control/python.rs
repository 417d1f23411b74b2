//! Text as Python writes it: `repr` of strings, and JSON in the style of its standard encoder.

use std::io;

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, Serializer};

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

/// Writes JSON byte for byte as Python's standard encoder does: `", "` and `": "`, ASCII only.
pub(crate) fn to_json<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut out = Vec::with_capacity(256);
    let mut serializer = Serializer::with_formatter(&mut out, PythonFormatter(CompactFormatter));
    value.serialize(&mut serializer)?;
    Ok(out)
}

struct PythonFormatter(CompactFormatter);

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        // Quotes, backslashes and everything below the space never reach this method.
        if fragment.bytes().all(|byte| byte < 0x7f) {
            return self.0.write_string_fragment(writer, fragment);
        }
        for c in fragment.chars() {
            if c < '\u{7f}' {
                let mut buffer = [0; 4];
                writer.write_all(c.encode_utf8(&mut buffer).as_bytes())?;
                continue;
            }
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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

    #[track_caller]
    fn check_json(value: serde_json::Value, expected: &str) {
        let bytes = to_json(&value).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), expected);
    }

    // Expectations are what `json.dumps` of CPython 3.11 prints for the same values.
    #[test]
    fn json_is_spaced_and_escaped_as_python_does() {
        check_json(
            json!({"ok": true, "result": {"ports": [1, 2], "none": null}}),
            r#"{"ok": true, "result": {"ports": [1, 2], "none": null}}"#,
        );
        check_json(json!([]), "[]");
        check_json(json!({}), "{}");
        check_json(
            json!("é😀\u{7f}\u{0}\u{1f}\u{8}\u{c}\n\r\t\"\\/"),
            r#""\u00e9\ud83d\ude00\u007f\u0000\u001f\b\f\n\r\t\"\\/""#,
        );
        check_json(json!(u64::MAX), "18446744073709551615");
    }
}
