//! How many transfers the owner wants in all.

use std::collections::HashSet;

use super::book::Book;
use super::types::ReserveError;
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

    /// Why one more transfer, called `id`, is refused: it could exceed the limit once all active ones have arrived.
    ///
    /// O(1) until handed and active transfers together reach the limit, then O(active).
    pub(super) fn refusal<C: Content>(
        &self,
        id: &TransferId,
        book: &Book<C>,
    ) -> Option<ReserveError> {
        let limit = self.max?;
        if self.handed.contains(id) || self.handed.len() + book.len() < limit {
            return None;
        }
        if self.handed.len() >= limit {
            return Some(ReserveError::NoMoreItems { limit });
        }
        let coming = book
            .iter()
            .filter(|(active, _)| !self.handed.contains(*active))
            .count();
        (self.handed.len() + coming >= limit).then_some(ReserveError::ItemsUnderWay { limit })
    }
}
