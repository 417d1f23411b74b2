//! How many transfers the owner wants in all.

use std::collections::HashSet;

use super::book::Book;
use crate::content::Content;
use crate::name::TransferId;

/// The distinct transfers handed to the owner, counted only where there is a limit.
pub(super) struct Quota {
    max: Option<usize>,
    handed: HashSet<TransferId>,
}

impl Quota {
    pub(super) fn new(max: Option<usize>) -> Self {
        Self {
            max,
            handed: HashSet::new(),
        }
    }

    /// The owner has got this transfer: it took it, or was told that it is ready.
    pub(super) fn count(&mut self, id: &TransferId) {
        if self.max.is_some() {
            self.handed.insert(id.clone());
        }
    }

    /// The limit, if one more transfer, called `id`, could exceed it once all active ones have arrived.
    ///
    /// O(1) until handed and active transfers together reach the limit, then O(active).
    pub(super) fn exceeded_by<C: Content>(&self, id: &TransferId, book: &Book<C>) -> Option<usize> {
        let max = self.max?;
        if self.handed.contains(id) || self.handed.len() + book.len() < max {
            return None;
        }
        let coming = book
            .iter()
            .filter(|(active, _)| !self.handed.contains(*active))
            .count();
        (self.handed.len() + coming >= max).then_some(max)
    }
}
