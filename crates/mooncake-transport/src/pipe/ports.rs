//! Which ports a pipe uses, derived from the two that are configured.
//!
//! Invariant: a plan exists only if no two of its ports meet on one host and all of them exist.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;

use super::config::{ConfigError, PipeConfig, Role};

/// What is added to the decode port where both sides have the same host and port.
const SAME_ADDRESS_SHIFT: u32 = 100;

/// The first port above those kept for engines.
const SOCKETS_FROM: u32 = 8;

/// Rank 9's engine would have the port of rank 0's notices, so no layout has more ranks than this.
const RANKS_MAX: u16 = 9;

/// What a port is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortKind {
    /// The engine's name.
    Engine,
    /// Notices of tensors that were sent.
    Notices,
    /// Answers to notices that were received.
    Answers,
}

impl fmt::Display for PortKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Engine => "engine",
            Self::Notices => "notices",
            Self::Answers => "answers",
        })
    }
}

/// One use of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PortUse {
    /// The side that listens.
    pub role: Role,
    /// The rank.
    pub rank: u16,
    /// What for.
    pub kind: PortKind,
}

impl fmt::Display for PortUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { role, rank, kind } = self;
        write!(f, "{role} rank {rank}'s {kind}")
    }
}

/// The ports on which one side of one rank listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Ports {
    /// The engine's name.
    pub engine: u16,
    /// Notices of tensors that were sent.
    pub notices: u16,
    /// Answers to notices that were received.
    pub answers: u16,
}

/// The ports of both sides of every rank, checked against one another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    prefill: Vec<Ports>,
    decode: Vec<Ports>,
}

impl PortPlan {
    /// Derives the ports of ranks 0 to `ranks` − 1.
    ///
    /// # Errors
    /// [`ConfigError::Ranks`], [`ConfigError::PortTooHigh`] and [`ConfigError::PortOverlap`].
    pub fn new(config: &PipeConfig, ranks: u16) -> Result<Self, ConfigError> {
        if !(1..=RANKS_MAX).contains(&ranks) {
            let max = RANKS_MAX;
            return Err(ConfigError::Ranks { ranks, max });
        }
        let is_same = config.side(Role::Prefill) == config.side(Role::Decode);
        let mut taken = HashMap::new();
        let mut side = |role| -> Result<Vec<Ports>, ConfigError> {
            let place = config.side(role);
            let mut base = u32::from(place.port());
            if role == Role::Decode && is_same {
                base += SAME_ADDRESS_SHIFT;
            }
            (0..ranks)
                .map(|rank| {
                    let sockets = base + SOCKETS_FROM + 2 * u32::from(rank);
                    let mut take = |kind, port: u32| {
                        let this = PortUse { role, rank, kind };
                        let port = u16::try_from(port)
                            .map_err(|_| ConfigError::PortTooHigh { taken: this, port })?;
                        match taken.insert((machine(place.host()), port), this) {
                            None => Ok(port),
                            Some(first) => Err(ConfigError::PortOverlap {
                                port,
                                first,
                                second: this,
                            }),
                        }
                    };
                    Ok(Ports {
                        engine: take(PortKind::Engine, base + u32::from(rank))?,
                        notices: take(PortKind::Notices, sockets + 1)?,
                        answers: take(PortKind::Answers, sockets + 2)?,
                    })
                })
                .collect()
        };
        Ok(Self {
            prefill: side(Role::Prefill)?,
            decode: side(Role::Decode)?,
        })
    }

    /// Returns the ports of one side of a rank, if the plan has the rank.
    pub fn ports(&self, role: Role, rank: u16) -> Option<Ports> {
        let side = match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        };
        side.get(usize::from(rank)).copied()
    }
}

/// A name for the machine that `host` is: whatever loops back is the same one.
fn machine(host: &str) -> String {
    let is_loopback = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if is_loopback || host.eq_ignore_ascii_case("localhost") {
        "localhost".to_owned()
    } else {
        host.to_ascii_lowercase()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn config(prefill: &str, decode: &str) -> PipeConfig {
        let text = json!({
            "prefill_url": prefill, "decode_url": decode, "metadata_server": "P2PHANDSHAKE",
        });
        PipeConfig::from_json(text.to_string().as_bytes()).unwrap()
    }

    fn overlap(prefill: &str, decode: &str, ranks: u16) -> (u16, String, String) {
        match PortPlan::new(&config(prefill, decode), ranks) {
            Err(ConfigError::PortOverlap {
                port,
                first,
                second,
            }) => (port, first.to_string(), second.to_string()),
            other => panic!("{other:?}"),
        }
    }

    // row: P8.5
    #[test]
    fn ports_are_those_of_the_table() {
        let plan = PortPlan::new(&config("a:5000", "b:7000"), 8).unwrap();
        for rank in 0..8 {
            let prefill = plan.ports(Role::Prefill, rank).unwrap();
            assert_eq!(prefill.engine, 5000 + rank);
            assert_eq!(prefill.notices, 5009 + 2 * rank);
            assert_eq!(prefill.answers, 5010 + 2 * rank);
            let decode = plan.ports(Role::Decode, rank).unwrap();
            assert_eq!(decode.engine, 7000 + rank);
            assert_eq!(decode.notices, 7009 + 2 * rank);
            assert_eq!(decode.answers, 7010 + 2 * rank);
        }
        assert_eq!(plan.ports(Role::Prefill, 8), None);
    }

    // row: P8.5
    #[test]
    fn the_same_address_twice_moves_the_decode_side_by_a_hundred() {
        let plan = PortPlan::new(&config("a:5000", "a:5000"), 8).unwrap();
        for rank in 0..8 {
            let decode = plan.ports(Role::Decode, rank).unwrap();
            assert_eq!(decode.engine, 5100 + rank);
            assert_eq!(decode.notices, 5109 + 2 * rank);
            assert_eq!(decode.answers, 5110 + 2 * rank);
        }
    }

    // row: P7.13
    #[test]
    fn ports_that_meet_are_refused_with_both_uses() {
        let (port, first, second) = overlap("a:5000", "a:5005", 3);
        assert_eq!(port, 5014);
        assert_eq!(first, "prefill rank 2's answers");
        assert_eq!(second, "decode rank 0's notices");
        let (port, first, second) = overlap("a:5000", "a:5009", 1);
        assert_eq!(port, 5009);
        assert_eq!(first, "prefill rank 0's notices");
        assert_eq!(second, "decode rank 0's engine");
        // Different names of the loopback are one machine, and get no shift.
        let (port, ..) = overlap("localhost:5000", "127.0.0.1:5000", 1);
        assert_eq!(port, 5000);
        assert!(PortPlan::new(&config("a:5000", "b:5005"), 9).is_ok());
        assert!(PortPlan::new(&config("a:5000", "a:5005"), 1).is_ok());
    }

    // row: P7.13
    #[test]
    fn ranks_without_room_and_ports_that_do_not_exist_are_refused() {
        let refused = |ranks| PortPlan::new(&config("a:5000", "b:5000"), ranks).unwrap_err();
        for ranks in [0, 10, u16::MAX] {
            assert_eq!(refused(ranks), ConfigError::Ranks { ranks, max: 9 });
        }
        let high = PortPlan::new(&config("a:65526", "b:1"), 1).unwrap_err();
        assert_eq!(
            high.to_string(),
            "prefill rank 0's answers would need port 65536, which is above 65535"
        );
        assert!(PortPlan::new(&config("a:65525", "b:1"), 1).is_ok());
        // The shift counts too.
        assert!(matches!(
            PortPlan::new(&config("a:65500", "a:65500"), 1),
            Err(ConfigError::PortTooHigh { port: 65_600, .. })
        ));
    }

    proptest! {
        // row: P7.13, P8.5
        #[test]
        fn property_a_plan_has_no_port_twice_on_one_host(
            prefill in 1..=u16::MAX, apart in -200..200_i32, same_host: bool, ranks in 1..=9_u16,
        ) {
            let decode = (i32::from(prefill) + apart).clamp(1, 65_535);
            let host = if same_host { "a" } else { "b" };
            let config = config(&format!("a:{prefill}"), &format!("{host}:{decode}"));
            let Ok(plan) = PortPlan::new(&config, ranks) else { return Ok(()) };
            let mut seen = std::collections::HashSet::new();
            for role in [Role::Prefill, Role::Decode] {
                for rank in 0..ranks {
                    let Ports { engine, notices, answers } = plan.ports(role, rank).unwrap();
                    for port in [engine, notices, answers] {
                        let place = config.side(role).host().to_owned();
                        prop_assert!(seen.insert((place, port)), "{} twice", port);
                    }
                }
            }
        }
    }
}
