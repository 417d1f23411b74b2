//! Sizes as people write them: `512MiB`, `1GiB`, plain bytes.

/// Parses a number of bytes with an optional unit.
///
/// Units are case-insensitive: `B`, `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024), `KB`, `MB`, `GB`, `TB` (powers
/// of 1000). The text of the error is what a person who typed it needs.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    if number.is_empty() {
        return Err(format!(
            "{text:?} is not a size; write whole numbers such as 512MiB, 1GiB or 1073741824"
        ));
    }
    let factor: u64 = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => {
            return Err(format!(
                "{unit:?} is not a unit of size; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB after a whole number"
            ));
        }
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| format!("{text:?} is more bytes than 64 bits can count"))
}

/// Bytes for a person: three digits or so with a binary unit.
pub(crate) fn show_size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0 of the smaller unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_decimal_and_no_units() {
        for (text, bytes) in [
            ("0", 0),
            ("1073741824", 1 << 30),
            ("512MiB", 512 << 20),
            ("1GiB", 1 << 30),
            (" 3 kib ", 3 << 10),
            ("2tib", 2 << 40),
            ("1GB", 1_000_000_000),
            ("7b", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_explained() {
        for (text, says) in [
            ("", "not a size"),
            ("MiB", "not a size"),
            ("-1", "not a size"),
            ("1.5GiB", "unit"),
            ("1G", "unit"),
            ("99999999999999999999", "64 bits"),
            ("18446744073709551615KiB", "64 bits"),
        ] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_are_shown_with_the_largest_unit_that_keeps_a_whole_part() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (512 << 20, "512.0 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(show_size(bytes), text);
        }
    }
}
