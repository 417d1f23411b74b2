//! How a pipe behaves where the configuration file says nothing.

use std::time::Duration;

use super::error::StartError;
use crate::wire::name::PeerName;

/// What is added to notices for peers of our kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// A third frame with session and number. The old pipe leaves it unread and answers as ever; a
    /// peer of our kind answers with the number.
    #[default]
    Extended,
    /// Nothing: for peers that refuse notices of three frames.
    Plain,
}

/// Options of a pipe. Values outside their range are a [`StartError::Setting`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PipeOptions {
    /// How many ranks share the configuration, 1 to 9; their ports are checked against one another.
    /// Default 1; the own rank counts in any case.
    pub ranks: u16,
    /// Bytes for tensors that were sent and not answered yet, 4 KiB to 1 TiB. Default 256 MiB. An
    /// image larger than this cannot be sent.
    pub send_bytes: u64,
    /// Bytes for tensors that were received and not dropped yet, 4 KiB to 1 TiB. Default 256 MiB. An
    /// image larger than this is refused.
    pub receive_bytes: u64,
    /// Tensors that were sent and not answered yet, 1 to 1,000. Default 256.
    pub outstanding_max: usize,
    /// What is added to notices.
    pub dialect: Dialect,
    /// The name of the peer's engine, `host:port`, where it is not the configured one: an old peer
    /// with `P2PHANDSHAKE` listens on a port of its own choice. Peers of our kind say their name.
    pub peer_session: Option<String>,
    /// For each answer of the peer, from when it is the next that is due; the peer answers when it
    /// receives. 1 ms to 24 h; default 120 s.
    pub answer_timeout: Duration,
    /// For the bytes of one tensor to be read, and for an answer of the peer's engine. 1 ms to 24 h;
    /// default 60 s.
    pub read_timeout: Duration,
    /// How long closing waits for notices and answers that the system has not taken yet. Up to 60 s;
    /// default 1 s.
    pub linger: Duration,
}

impl Default for PipeOptions {
    fn default() -> Self {
        Self {
            ranks: 1,
            send_bytes: 256 << 20,
            receive_bytes: 256 << 20,
            outstanding_max: 256,
            dialect: Dialect::default(),
            peer_session: None,
            answer_timeout: Duration::from_secs(120),
            read_timeout: Duration::from_secs(60),
            linger: Duration::from_secs(1),
        }
    }
}

impl PipeOptions {
    /// Checks every option but the ranks, which the port plan checks.
    pub(super) fn check(&self) -> Result<(), StartError> {
        let millis = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        const DAY_MS: u64 = 24 * 60 * 60 * 1_000;
        let settings = [
            ("send_bytes", self.send_bytes, 4 << 10, 1 << 40),
            ("receive_bytes", self.receive_bytes, 4 << 10, 1 << 40),
            ("outstanding_max", self.outstanding_max as u64, 1, 1_000),
            ("answer_timeout", millis(self.answer_timeout), 1, DAY_MS),
            ("read_timeout", millis(self.read_timeout), 1, DAY_MS),
            ("linger", millis(self.linger), 0, 60_000),
        ];
        for (setting, value, min, max) in settings {
            if !(min..=max).contains(&value) {
                return Err(StartError::Setting {
                    setting,
                    value,
                    min,
                    max,
                });
            }
        }
        if let Some(name) = &self.peer_session {
            PeerName::parse(name).map_err(|source| crate::EngineError::PeerName {
                name: name.clone(),
                source,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_outside_their_range_are_named() {
        let named = |change: fn(&mut PipeOptions)| {
            let mut options = PipeOptions::default();
            change(&mut options);
            match options.check() {
                Err(StartError::Setting { setting, .. }) => setting,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(named(|o| o.send_bytes = 0), "send_bytes");
        assert_eq!(named(|o| o.receive_bytes = u64::MAX), "receive_bytes");
        assert_eq!(named(|o| o.outstanding_max = 0), "outstanding_max");
        assert_eq!(
            named(|o| o.answer_timeout = Duration::ZERO),
            "answer_timeout"
        );
        assert_eq!(named(|o| o.read_timeout = Duration::MAX), "read_timeout");
        assert_eq!(named(|o| o.linger = Duration::MAX), "linger");
        let options = PipeOptions {
            peer_session: Some("a b:1".into()),
            ..PipeOptions::default()
        };
        assert!(matches!(options.check(), Err(StartError::Engine(_))));
        PipeOptions::default().check().unwrap();
    }
}
