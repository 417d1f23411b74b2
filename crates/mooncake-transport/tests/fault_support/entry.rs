//! What may be under one key of a store that is called over connections which break.

/// A value, or none.
type Value = Option<Vec<u8>>;

/// One key, as far as its calls have told.
///
/// A call that failed half way may have been carried out, and may still be later, once.
#[derive(Default)]
pub(crate) struct Entry {
    known: Value,
    late: Vec<Value>,
}

impl Entry {
    pub(crate) fn may_be(&self, value: &Value) -> bool {
        self.known == *value || self.late.contains(value)
    }

    /// A value that may be there.
    pub(crate) fn known(&self) -> &Value {
        &self.known
    }

    /// The store says what is there.
    #[track_caller]
    pub(crate) fn read(&mut self, found: Value) {
        if self.known != found {
            let len = found.as_ref().map(Vec::len);
            let at = self.late.iter().position(|value| *value == found);
            let at = at.unwrap_or_else(|| panic!("nobody has put these {len:?} bytes"));
            self.late.swap_remove(at);
        }
        self.known = found;
    }

    /// The value was to be put.
    pub(crate) fn put<E>(&mut self, value: Vec<u8>, put: Result<(), E>) -> Result<(), E> {
        match &put {
            Ok(()) => self.known = Some(value),
            Err(_) => self.may_become(Some(value)),
        }
        put
    }

    /// The store refuses to replace what is there.
    #[track_caller]
    pub(crate) fn kept(&self) {
        let there = self.known.is_some() || self.late.iter().any(Option::is_some);
        assert!(there, "nothing was there to be kept");
    }

    /// The key was to be removed. The store says whether it was there.
    #[track_caller]
    pub(crate) fn delete<E>(&mut self, deleted: Result<bool, E>) -> Result<(), E> {
        let was_there = deleted.inspect_err(|_| self.may_become(None))?;
        let may_have_been = |value: &Value| value.is_some() == was_there;
        assert!(
            may_have_been(&self.known) || self.late.iter().any(may_have_been),
            "deleted, and the key was there: {was_there}"
        );
        self.known = None;
        Ok(())
    }

    /// The value was to be replaced. The store says whether it was.
    #[track_caller]
    pub(crate) fn swap<E>(
        &mut self,
        expected: &Value,
        new: Vec<u8>,
        swapped: Result<bool, E>,
    ) -> Result<(), E> {
        let swapped = match swapped {
            Ok(swapped) => swapped,
            Err(error) => {
                self.may_become(Some(new));
                return Err(error);
            }
        };
        if swapped {
            assert!(self.may_be(expected), "replaced what was not there");
            self.known = Some(new);
        } else {
            let is_certain = self.late.is_empty() && self.known == *expected;
            assert!(!is_certain, "not replaced, although it was there");
        }
        Ok(())
    }

    /// A call that would have left this has failed.
    pub(crate) fn may_become(&mut self, value: Value) {
        self.late.push(value);
    }
}
