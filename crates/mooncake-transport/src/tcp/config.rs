//! How a TCP engine listens, what it allows, and how long it waits.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use crate::error::EngineError;
use crate::wire::control::{FRAME_BYTES_MAX, PEER_FRAME_BYTES_MAX};
use crate::wire::name::{PeerName, is_wildcard};

/// Configuration of a [`TcpEngine`](super::TcpEngine). The default listens on loopback only.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TcpConfig {
    /// Address both listeners bind to. A wildcard address needs `advertise`.
    pub bind: IpAddr,
    /// Host that peers are told to dial; the bound address if `None`.
    pub advertise: Option<String>,
    /// Port of the control listener; any free one if `None`.
    pub control_port: Option<u16>,
    /// Port of the data listener; any free one if `None`.
    pub data_port: Option<u16>,
    /// Whether peers may connect. Without listeners the engine only initiates: it registers memory
    /// for local access alone, and its session names port 0, which nobody can dial.
    pub listen: bool,
    /// Who may connect; everybody if empty.
    pub allow_from: Vec<Subnet>,
    /// Bounds of every queue and connection count.
    pub limits: TcpLimits,
    /// Bounds of every wait.
    pub timeouts: TcpTimeouts,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            advertise: None,
            control_port: None,
            data_port: None,
            listen: true,
            allow_from: Vec::new(),
            limits: TcpLimits::default(),
            timeouts: TcpTimeouts::default(),
        }
    }
}

/// Bounds of queues and counts of a TCP engine. A value outside its range is an
/// [`EngineError::Setting`] when the engine is started.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TcpLimits {
    /// Data connections accepted at a time, idle ones included. Default 4,096. Each needs a file
    /// descriptor; a quarter of those that the process may open (`ulimit -n`), and at least 64, are
    /// left to the rest of it, whatever is configured here. When there are that many, a new one takes the place of the one that has
    /// been idle between requests for longest, and at least for a second; if there is none, the new
    /// one is closed at once.
    pub inbound_data_max: usize,
    /// Control connections accepted at a time; further ones are closed at once. Default 256.
    pub inbound_control_max: usize,
    /// Data connections per opened segment, 1 to 16. Default 4.
    pub lanes_per_peer: usize,
    /// Requests under way, as target and as initiator together, whose memory the host cannot address:
    /// the bytes of each pass through a buffer, of up to 256 KiB if the memory does not bring its own
    /// kind. Others wait for one of them to end, within their deadline. 1 to 65,536; default 256.
    pub bounces_max: usize,
    /// Tasks in one batch, 1 to 2^24. Default 65,536.
    pub batch_tasks_max: usize,
    /// Tasks under way in the engine, `batch_tasks_max` to 2^24. Default 262,144.
    pub tasks_open_max: usize,
    /// Notifications kept until they are taken, 1 to 2^20; older ones are dropped. Default 1,024.
    pub notices_max: usize,
    /// Bytes of kept notifications, 1 MiB to 1 GiB; older ones are dropped. Default 16 MiB.
    pub notices_bytes_max: usize,
    /// Bytes of our descriptor, 1 KiB to 128 MiB. Default 1 MiB, which is what real peers read.
    pub descriptor_bytes_max: u64,
    /// Bytes of a peer's descriptor that `open_segment` reads, 1 KiB to 128 MiB. Default 16 MiB, enough
    /// for some 200,000 buffers. When the engine fetches a descriptor again by itself, it reads at most
    /// 1 MiB; what is longer is left to the next `open_segment`.
    pub peer_descriptor_bytes_max: u64,
    /// Bytes read and thrown away after a rejection, so that the peer gets to see it, 1 to 1 GiB.
    /// Default 64 MiB.
    pub reject_drain_bytes_max: u64,
}

impl Default for TcpLimits {
    fn default() -> Self {
        Self {
            inbound_data_max: 4_096,
            inbound_control_max: 256,
            lanes_per_peer: 4,
            bounces_max: 256,
            batch_tasks_max: 65_536,
            tasks_open_max: 262_144,
            notices_max: 1_024,
            notices_bytes_max: 16 << 20,
            descriptor_bytes_max: PEER_FRAME_BYTES_MAX,
            peer_descriptor_bytes_max: 16 << 20,
            reject_drain_bytes_max: 64 << 20,
        }
    }
}

/// Shortest and longest wait that can be configured. A day is as good as for ever, and can be added
/// to any moment.
const WAIT_MIN: Duration = Duration::from_millis(1);
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Bounds of waits of a TCP engine, each from 1 ms to 24 h, and of how slow a peer may be. There is
/// none between requests of a connection: a real peer does not notice that its idle connection was
/// closed, and fails the next transfer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TcpTimeouts {
    /// For a connection to be accepted, per address. Default 5 s.
    pub connect: Duration,
    /// For a control reply; real peers serve one control connection at a time and may take 5 s for
    /// each. Default 60 s.
    pub control_reply: Duration,
    /// Without a byte on an accepted control connection. Default 5 s.
    pub control_idle: Duration,
    /// For an accepted control connection as a whole. Default 300 s.
    pub control_total: Duration,
    /// Without a byte inside a request on a data connection, as initiator and as target. Default
    /// 30 s.
    pub progress: Duration,
    /// For the status of a request that was sent in full. Default 30 s.
    pub status: Duration,
    /// Bytes a second that a task, or a request of a peer, has to move on average, so that a peer which
    /// moves one now and then does not hold it for ever; see [`task_max`](TcpTimeouts::task_max). From
    /// 1 to 1 GiB; default 64 KiB.
    pub min_bytes_per_s: u64,
    /// For the rest of a request's header on an accepted data connection, however it trickles in; no
    /// longer than `progress`. Default 10 s.
    pub header: Duration,
    /// For a rejected peer to close. Default 2 s.
    pub reject_drain: Duration,
    /// Between two fetches of one segment's descriptor after failures. Default 1 s.
    pub refresh_interval: Duration,
}

impl Default for TcpTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            control_reply: Duration::from_secs(60),
            control_idle: Duration::from_secs(5),
            control_total: Duration::from_secs(300),
            progress: Duration::from_secs(30),
            status: Duration::from_secs(30),
            header: Duration::from_secs(10),
            min_bytes_per_s: 64 << 10,
            reject_drain: Duration::from_secs(2),
            refresh_interval: Duration::from_secs(1),
        }
    }
}

impl TcpTimeouts {
    /// Returns how long a task of `len` bytes may take on its connection, however it moves:
    /// `progress`, and `status`, and the time that `len` takes at `min_bytes_per_s`.
    ///
    /// A request of a peer that is not done by then is cut off, and a task settles as [`Remote::Unknown`](crate::Remote::Unknown) with
    /// [`Reason::TooSlow`](crate::Reason::TooSlow). With the default a task of 64 MiB has 1,084 s.
    pub fn task_max(&self, len: u64) -> Duration {
        // Below 1 only before the configuration has been checked.
        let rate = self.min_bytes_per_s.max(1);
        let rest_ns = u128::from(len % rate) * 1_000_000_000 / u128::from(rate);
        Duration::from_secs(len / rate)
            .saturating_add(Duration::from_nanos(rest_ns as u64))
            .saturating_add(self.progress)
            .saturating_add(self.status)
    }

    /// Returns what a control exchange may wait for.
    pub(crate) fn waits(&self) -> Waits {
        Waits {
            connect: self.connect,
            reply: self.control_reply,
        }
    }
}

/// What one control exchange may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waits {
    /// For a connection to be accepted, per address.
    pub(crate) connect: Duration,
    /// For the reply, once there is a connection.
    pub(crate) reply: Duration,
}

impl Waits {
    /// Returns what an exchange with one address may take.
    pub(crate) fn total(self) -> Duration {
        self.connect.saturating_add(self.reply)
    }

    /// Returns what the exchange with the first of `count` addresses may wait for, so that all may be asked within
    /// `left`. Each has an equal part for its connection; whoever accepts one may use up what is left.
    pub(crate) fn within(self, left: Duration, count: usize) -> Self {
        let parts = u32::try_from(count.max(1)).unwrap_or(u32::MAX);
        let connect = self.connect.min(left / parts);
        Self {
            connect,
            reply: self.reply.min(left.saturating_sub(connect)),
        }
    }
}

impl TcpConfig {
    /// Checks every setting and returns the host to advertise.
    pub(super) fn check(&self) -> Result<String, EngineError> {
        let host = match &self.advertise {
            Some(host) => {
                // `[::1]` and `::1` are the same host.
                let bare = host
                    .strip_prefix('[')
                    .and_then(|host| host.strip_suffix(']'))
                    .unwrap_or(host);
                PeerName::new(bare, 1).map_err(|source| EngineError::AdvertisedHost {
                    host: host.clone(),
                    source,
                })?;
                if is_wildcard(bare) {
                    return Err(EngineError::WildcardAdvertised { host: host.clone() });
                }
                bare.to_owned()
            }
            None if self.listen && self.bind.is_unspecified() => {
                return Err(EngineError::WildcardBind { bind: self.bind });
            }
            None => self.bind.to_string(),
        };
        let limits = &self.limits;
        let counts = [
            ("lanes_per_peer", limits.lanes_per_peer as u64, 1, 16),
            (
                "inbound_data_max",
                limits.inbound_data_max as u64,
                1,
                1 << 20,
            ),
            (
                "inbound_control_max",
                limits.inbound_control_max as u64,
                1,
                1 << 16,
            ),
            ("bounces_max", limits.bounces_max as u64, 1, 1 << 16),
            ("batch_tasks_max", limits.batch_tasks_max as u64, 1, 1 << 24),
            // Otherwise there are batches of legal length that never can be submitted.
            (
                "tasks_open_max",
                limits.tasks_open_max as u64,
                limits.batch_tasks_max as u64,
                1 << 24,
            ),
            ("notices_max", limits.notices_max as u64, 1, 1 << 20),
            // One of the longest that is read must fit.
            (
                "notices_bytes_max",
                limits.notices_bytes_max as u64,
                PEER_FRAME_BYTES_MAX,
                1 << 30,
            ),
            (
                "reject_drain_bytes_max",
                limits.reject_drain_bytes_max,
                1,
                1 << 30,
            ),
            ("min_bytes_per_s", self.timeouts.min_bytes_per_s, 1, 1 << 30),
            (
                "descriptor_bytes_max",
                limits.descriptor_bytes_max,
                1 << 10,
                FRAME_BYTES_MAX,
            ),
            (
                "peer_descriptor_bytes_max",
                limits.peer_descriptor_bytes_max,
                1 << 10,
                FRAME_BYTES_MAX,
            ),
        ];
        for (setting, value, min, max) in counts {
            if !(min..=max).contains(&value) {
                return Err(EngineError::Setting {
                    setting,
                    value,
                    min,
                    max,
                });
            }
        }
        let timeouts = &self.timeouts;
        let waits = [
            ("connect", timeouts.connect),
            ("control_reply", timeouts.control_reply),
            ("control_idle", timeouts.control_idle),
            ("control_total", timeouts.control_total),
            ("progress", timeouts.progress),
            ("status", timeouts.status),
            ("header", timeouts.header),
            ("reject_drain", timeouts.reject_drain),
            ("refresh_interval", timeouts.refresh_interval),
        ];
        for (setting, wait) in waits {
            if !(WAIT_MIN..=WAIT_MAX).contains(&wait) {
                return Err(EngineError::Setting {
                    setting,
                    value: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                    min: WAIT_MIN.as_millis() as u64,
                    max: WAIT_MAX.as_millis() as u64,
                });
            }
        }
        Ok(host)
    }

    pub(super) fn allows(&self, peer: &SocketAddr) -> bool {
        self.allow_from.is_empty() || self.allow_from.iter().any(|net| net.contains(peer.ip()))
    }
}

/// A range of IP addresses: `10.0.0.0/8`, `::1/128`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subnet {
    address: IpAddr,
    prefix: u8,
}

/// A text that is no [`Subnet`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no address range; expected ADDRESS or ADDRESS/BITS")]
pub struct SubnetError {
    text: String,
}

impl Subnet {
    /// Says whether `address` lies in the range; IPv4-mapped IPv6 addresses count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(address)) => {
                let shift = 32 - u32::from(self.prefix);
                let bits = |address: Ipv4Addr| address.to_bits().checked_shr(shift);
                bits(net) == bits(address)
            }
            (IpAddr::V6(net), IpAddr::V6(address)) => {
                let shift = 128 - u32::from(self.prefix);
                net.to_bits().checked_shr(shift) == address.to_bits().checked_shr(shift)
            }
            _ => false,
        }
    }
}

impl From<IpAddr> for Subnet {
    fn from(address: IpAddr) -> Self {
        let address = address.to_canonical();
        Self {
            address,
            prefix: if address.is_ipv4() { 32 } else { 128 },
        }
    }
}

impl FromStr for Subnet {
    type Err = SubnetError;

    fn from_str(text: &str) -> Result<Self, SubnetError> {
        let error = || SubnetError {
            text: text.to_owned(),
        };
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| error())?;
        let widest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => prefix.parse().map_err(|_| error())?,
            None => widest,
        };
        if prefix > widest {
            return Err(error());
        }
        Ok(Self { address, prefix })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // row: W5.2b
    #[test]
    fn a_wildcard_needs_an_advertised_host() {
        let mut config = TcpConfig {
            bind: "0.0.0.0".parse().unwrap(),
            ..TcpConfig::default()
        };
        assert_eq!(
            config.check(),
            Err(EngineError::WildcardBind { bind: config.bind })
        );
        config.advertise = Some("worker-1".into());
        assert_eq!(config.check(), Ok("worker-1".into()));
        config.advertise = Some("[::1]".into());
        assert_eq!(config.check(), Ok("::1".into()));
        for wildcard in ["0.0.0.0", "::", "[::]", "0"] {
            config.advertise = Some(wildcard.into());
            let host = wildcard.to_owned();
            assert_eq!(
                config.check(),
                Err(EngineError::WildcardAdvertised { host })
            );
        }
        for bad in ["", "a b", "a/b"] {
            config.advertise = Some(bad.into());
            assert!(
                matches!(config.check(), Err(EngineError::AdvertisedHost { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn the_default_is_loopback() {
        assert_eq!(TcpConfig::default().check(), Ok("127.0.0.1".into()));
    }

    #[test]
    fn settings_outside_their_range_are_named() {
        let mut config = TcpConfig::default();
        config.limits.lanes_per_peer = 17;
        assert_eq!(
            config.check(),
            Err(EngineError::Setting {
                setting: "lanes_per_peer",
                value: 17,
                min: 1,
                max: 16
            })
        );
        let named = |change: &dyn Fn(&mut TcpConfig)| {
            let mut config = TcpConfig::default();
            change(&mut config);
            match config.check() {
                Err(EngineError::Setting { setting, min, .. }) => (setting, min),
                other => panic!("{other:?}"),
            }
        };
        let notices: [&dyn Fn(&mut TcpConfig); 2] = [
            &|config| config.limits.notices_bytes_max = (1 << 20) - 1,
            &|config| config.limits.notices_bytes_max = usize::MAX,
        ];
        for change in notices {
            assert_eq!(named(change), ("notices_bytes_max", 1 << 20));
        }
        for drain in [0, u64::MAX] {
            let found = named(&|config| config.limits.reject_drain_bytes_max = drain);
            assert_eq!(found, ("reject_drain_bytes_max", 1));
        }
        for rate in [0, u64::MAX] {
            let found = named(&|config| config.timeouts.min_bytes_per_s = rate);
            assert_eq!(found, ("min_bytes_per_s", 1));
        }
        let found = named(&|config| config.limits.peer_descriptor_bytes_max = 0);
        assert_eq!(found, ("peer_descriptor_bytes_max", 1 << 10));
        // A batch of legal length can be submitted.
        let found = named(&|config| config.limits.tasks_open_max = 65_535);
        assert_eq!(found, ("tasks_open_max", 65_536));
        for wait in [Duration::ZERO, Duration::MAX] {
            let mut config = TcpConfig::default();
            config.timeouts.progress = wait;
            assert!(matches!(
                config.check(),
                Err(EngineError::Setting {
                    setting: "progress",
                    max: 86_400_000,
                    ..
                })
            ));
        }
    }

    #[test]
    fn a_task_may_take_as_long_as_its_length_takes_at_the_least_rate() {
        let timeouts = TcpTimeouts::default();
        let longest = |len| timeouts.task_max(len).as_millis();
        assert_eq!(longest(0), 60_000);
        assert_eq!(longest(1 << 15), 60_500);
        assert_eq!(longest(64 << 20), 1_084_000);
        assert!(timeouts.task_max(u64::MAX) > Duration::from_secs(1 << 47));
    }

    #[test]
    fn subnets_contain_what_their_prefix_says() {
        let check = |net: &str, address: &str, expected: bool| {
            let net: Subnet = net.parse().unwrap();
            assert_eq!(
                net.contains(address.parse().unwrap()),
                expected,
                "{net:?} {address}"
            );
        };
        check("10.0.0.0/8", "10.255.0.1", true);
        check("10.0.0.0/8", "11.0.0.1", false);
        check("10.0.0.0/8", "::ffff:10.1.1.1", true);
        check("0.0.0.0/0", "1.2.3.4", true);
        check("0.0.0.0/0", "::1", false);
        check("127.0.0.1", "127.0.0.1", true);
        check("127.0.0.1", "127.0.0.2", false);
        check("fe80::/10", "fe80::1", true);
        check("::/0", "::1", true);
        for bad in ["", "10.0.0.0/33", "x/8", "10.0.0.0/", "::1/129"] {
            assert!(bad.parse::<Subnet>().is_err(), "{bad}");
        }
    }
}
