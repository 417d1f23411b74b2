//! The bounded queue of notifications that have arrived.

use std::collections::VecDeque;

use crate::engine::Notices;
use crate::wire::control::Notice;

pub(super) struct NoticeQueue {
    queue: VecDeque<Notice>,
    bytes: usize,
    dropped: u64,
    count_max: usize,
    bytes_max: usize,
}

fn size(notice: &Notice) -> usize {
    notice.name.len() + notice.message.len()
}

impl NoticeQueue {
    pub(super) fn new(count_max: usize, bytes_max: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            bytes: 0,
            dropped: 0,
            count_max,
            bytes_max,
        }
    }

    /// Adds a notification; the oldest ones are dropped and counted to make room.
    pub(super) fn push(&mut self, notice: Notice) {
        self.bytes += size(&notice);
        self.queue.push_back(notice);
        while self.queue.len() > self.count_max || self.bytes > self.bytes_max {
            let Some(oldest) = self.queue.pop_front() else {
                break;
            };
            self.bytes -= size(&oldest);
            self.dropped += 1;
        }
    }

    pub(super) fn take(&mut self) -> Notices {
        self.bytes = 0;
        Notices {
            notices: std::mem::take(&mut self.queue).into(),
            dropped: std::mem::take(&mut self.dropped),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(name: &str) -> Notice {
        Notice {
            name: name.into(),
            message: String::new(),
        }
    }

    // row: W9a
    #[test]
    fn the_oldest_are_dropped_and_counted() {
        let mut queue = NoticeQueue::new(2, 100);
        for name in ["a", "b", "c"] {
            queue.push(notice(name));
        }
        let taken = queue.take();
        assert_eq!(taken.notices, [notice("b"), notice("c")]);
        assert_eq!(taken.dropped, 1);
        assert_eq!(queue.take(), Notices::default());
    }

    #[test]
    fn bytes_are_bounded_too() {
        let mut queue = NoticeQueue::new(10, 10);
        queue.push(notice("123456"));
        queue.push(notice("78901"));
        assert_eq!(queue.take().notices, [notice("78901")]);
        queue.push(notice("more than ten bytes"));
        let taken = queue.take();
        assert!(taken.notices.is_empty());
        assert_eq!(taken.dropped, 1);
    }
}
