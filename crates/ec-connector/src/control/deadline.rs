//! Ends of waits that may be for ever.

use std::time::{Duration, Instant};

/// When a wait of `wait` from now ends; nothing if the clock cannot count so far, which is for ever.
pub(crate) fn deadline_after(wait: Duration) -> Option<Instant> {
    Instant::now().checked_add(wait)
}

/// What is left of a wait, as the message library counts it: milliseconds, rounded up so that the last wait does not
/// become a busy one, and -1 for ever.
pub(super) fn left_millis(deadline: Option<Instant>) -> i64 {
    let Some(deadline) = deadline else {
        return -1;
    };
    let left = deadline.saturating_duration_since(Instant::now());
    i64::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i64::MAX)
}

/// Whether a wait has ended.
pub(super) fn has_passed(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_beyond_the_clock_has_no_end() {
        let never = deadline_after(Duration::MAX);
        assert_eq!(never, None);
        assert_eq!(left_millis(never), -1);
        assert!(!has_passed(never));
        let soon = deadline_after(Duration::from_micros(10_500));
        assert!((1..=11).contains(&left_millis(soon)));
        let past = deadline_after(Duration::ZERO);
        assert_eq!(left_millis(past), 0);
        assert!(has_passed(past));
    }
}
