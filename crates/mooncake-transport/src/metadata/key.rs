//! Where an engine's values are in a store.

use super::error::StoreError;

/// What all keys start with.
const PREFIX: &str = "mooncake/";

/// Longest name, and longest cluster id, in bytes.
const PART_BYTES_MAX: usize = 512;

/// Makes the keys of engines of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// Creates the keys of the cluster `id`, which for real engines is `MC_METADATA_CLUSTER_ID`; without
    /// one if it is empty.
    ///
    /// # Errors
    /// [`StoreError::Name`] if `id` has more than 512 bytes or a control character.
    ///
    /// # Source
    /// The project's protocol page on the Mooncake wire, section 10.3.
    pub fn new(id: &str) -> Result<Self, StoreError> {
        if id.len() > PART_BYTES_MAX || id.chars().any(char::is_control) {
            return Err(StoreError::Name {
                name: id.to_owned(),
            });
        }
        let slash = if id.is_empty() || id.ends_with('/') {
            ""
        } else {
            "/"
        };
        Ok(Self {
            prefix: format!("{PREFIX}{id}{slash}"),
        })
    }

    /// Returns the key of the descriptor of the engine called `name`.
    ///
    /// # Errors
    /// [`StoreError::Name`] if `name` is empty, has more than 512 bytes, a control character, or a slash,
    /// with which real engines look for it elsewhere.
    pub fn descriptor(&self, name: &str) -> Result<String, StoreError> {
        self.key("ram/", name)
    }

    /// Returns the key of where the engine called `name` takes control exchanges.
    ///
    /// # Errors
    /// As [`descriptor`](Keys::descriptor).
    pub fn rpc_meta(&self, name: &str) -> Result<String, StoreError> {
        self.key("rpc_meta/", name)
    }

    fn key(&self, kind: &str, name: &str) -> Result<String, StoreError> {
        let bad = |c: char| c.is_control() || c == '/';
        if name.is_empty() || name.len() > PART_BYTES_MAX || name.contains(bad) {
            return Err(StoreError::Name {
                name: name.to_owned(),
            });
        }
        Ok(format!("{}{kind}{name}", self.prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // row: W10.3
    #[test]
    fn keys_are_those_of_real_engines() {
        let check = |id, descriptor, rpc_meta| {
            let keys = Keys::new(id).unwrap();
            assert_eq!(keys.descriptor("a:1").unwrap(), descriptor);
            assert_eq!(keys.rpc_meta("a:1").unwrap(), rpc_meta);
        };
        check("", "mooncake/ram/a:1", "mooncake/rpc_meta/a:1");
        check("c", "mooncake/c/ram/a:1", "mooncake/c/rpc_meta/a:1");
        check("c/", "mooncake/c/ram/a:1", "mooncake/c/rpc_meta/a:1");
        check("c/d", "mooncake/c/d/ram/a:1", "mooncake/c/d/rpc_meta/a:1");
        let keys = Keys::new("").unwrap();
        let spaced = keys.descriptor(" a b ");
        assert_eq!(spaced.as_deref(), Ok("mooncake/ram/ a b "));
    }

    #[test]
    fn a_name_that_real_engines_would_look_for_elsewhere_is_refused() {
        let keys = Keys::new("").unwrap();
        let long = "x".repeat(PART_BYTES_MAX + 1);
        for name in ["", "ram/x", "/x", "a\tb", "a\r\nb", &long] {
            let error = StoreError::Name { name: name.into() };
            assert_eq!(keys.descriptor(name), Err(error.clone()), "{name:?}");
            assert_eq!(keys.rpc_meta(name), Err(error), "{name:?}");
        }
        assert!(Keys::new("a\0").is_err());
    }
}
