//! Time as the pure machines see it: a number the caller passes in.

/// Milliseconds as people say them: `0.25 s`, `2 s`, `1.8 s`, `60 s`.
pub(crate) fn seconds(millis: u64) -> String {
    let text = match millis {
        0..1_000 => format!("{:.2}", millis as f64 / 1e3),
        1_000..10_000 => format!("{:.1}", millis as f64 / 1e3),
        _ => return format!("{} s", millis.saturating_add(500) / 1_000),
    };
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "0" && millis > 0 {
        format!("{millis} ms")
    } else {
        format!("{text} s")
    }
}

/// A point in monotonic time, in milliseconds since an epoch the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// Milliseconds since the caller's epoch.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the caller's epoch.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// The moment `millis` later; the end of time when that is beyond 64 bits.
    #[must_use]
    pub const fn after_millis(self, millis: u64) -> Self {
        Self(self.0.saturating_add(millis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_shown_as_people_say_them() {
        for (millis, text) in [
            (0, "0 s"),
            (4, "4 ms"),
            (7, "0.01 s"),
            (250, "0.25 s"),
            (500, "0.5 s"),
            (1_000, "1 s"),
            (1_750, "1.8 s"),
            (2_013, "2 s"),
            (9_999, "10 s"),
            (59_700, "60 s"),
            (300_000, "300 s"),
            (u64::MAX, "18446744073709551 s"),
        ] {
            assert_eq!(seconds(millis), text);
        }
    }
}
