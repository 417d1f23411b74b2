//! Log lines that a peer can cause as often as it likes.

use std::time::{Duration, Instant};

/// Admits one log line in each period and counts the others.
pub(super) struct Throttle {
    period: Duration,
    admitted: Option<Instant>,
    suppressed: u64,
}

const PERIOD: Duration = Duration::from_secs(1);

impl Default for Throttle {
    /// One line a second.
    fn default() -> Self {
        Self::new(PERIOD)
    }
}

impl Throttle {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            period,
            admitted: None,
            suppressed: 0,
        }
    }

    /// Whether to log now; the number is how many lines were left out since the last one.
    pub(super) fn admit(&mut self) -> Option<u64> {
        let now = Instant::now();
        let due = self
            .admitted
            .is_none_or(|last| now.duration_since(last) >= self.period);
        if !due {
            self.suppressed += 1;
            return None;
        }
        self.admitted = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_passes_and_the_next_is_counted() {
        let mut throttle = Throttle::default();
        assert_eq!(throttle.admit(), Some(0));
        assert_eq!(throttle.admit(), None);
        assert_eq!(throttle.admit(), None);
        throttle.admitted = throttle.admitted.and_then(|last| last.checked_sub(PERIOD));
        assert_eq!(throttle.admit(), Some(2));
    }
}
