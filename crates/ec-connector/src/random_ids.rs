//! Ids that nobody else has.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::content_hash::hex;
use crate::name::{ReservationId, TransferId};

/// Draws 128-bit ids from a seed that the system gave: only making it can fail, drawing cannot.
#[derive(Debug)]
pub(crate) struct IdSource {
    seed: [u8; 32],
    drawn: AtomicU64,
}

impl IdSource {
    pub(crate) fn new() -> io::Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::other(error.to_string()),
        })?;
        Ok(Self {
            seed,
            drawn: AtomicU64::new(0),
        })
    }

    fn draw(&self) -> [u8; 16] {
        let serial = self.drawn.fetch_add(1, Ordering::Relaxed);
        let mut hash = Sha256::new_with_prefix(self.seed);
        hash.update(serial.to_le_bytes());
        let digest = hash.finalize();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        id
    }

    /// 32 lower-case hexadecimal digits.
    pub(crate) fn transfer_id(&self) -> TransferId {
        match TransferId::new(hex(&self.draw())) {
            Ok(id) => id,
            Err(_) => unreachable!("32 digits are shorter than the longest name"),
        }
    }

    pub(crate) fn reservation_id(&self) -> ReservationId {
        ReservationId::from_random(u128::from_le_bytes(self.draw()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_within_a_source_and_between_sources() {
        let (one, two) = (IdSource::new().unwrap(), IdSource::new().unwrap());
        let ids: std::collections::HashSet<_> = (0..100)
            .flat_map(|_| [one.transfer_id(), two.transfer_id()])
            .collect();
        assert_eq!(ids.len(), 200);
        assert!(ids.iter().all(|id| id.as_str().len() == 32));
    }
}
