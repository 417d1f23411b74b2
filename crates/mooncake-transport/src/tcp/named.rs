//! What an engine under a name in a metadata store needs of the TCP engine, and what both share:
//! exchanges with, and segments at, a place that is known already.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::peer::{Endpoint, PeerHandle, PeerLink, Replaced, at_port, dialable, with_fallback};
use super::shared::Command;
use super::{TcpEngine, Waits, resolve_host};
use crate::error::{ControlError, EngineError};
use crate::segment::{Segment, WeakSegment};
use crate::wire::JsonError;
use crate::wire::control::{
    FrameError, FrameKind, Notice, PEER_FRAME_BYTES_MAX, PROBE_REQUEST, check_json,
};
use crate::wire::descriptor::Descriptor;

impl TcpEngine {
    /// Returns the descriptor as it is now, encoded.
    pub(crate) fn descriptor_text(&self) -> String {
        self.shared.registry().descriptor().encode()
    }

    /// Returns the host that peers are told to dial, without brackets.
    pub(crate) fn advertised_host(&self) -> String {
        let host = self.shared.registry().request_descriptor().data_host;
        host.unwrap_or_else(|| self.control_address.ip().to_string())
    }

    /// Returns the addresses of `host` at `port` where something other than our own control listener may
    /// answer.
    pub(crate) fn not_ours_at(
        &self,
        host: &str,
        port: u16,
    ) -> Result<Vec<SocketAddr>, EngineError> {
        let mut addresses = resolve_named(host, port)?;
        addresses.retain(|address| !is_served_by(self.control_address, *address, can_bind));
        Ok(addresses)
    }

    pub(crate) fn is_own_thread(&self) -> bool {
        self.shared.on_reactor_thread()
    }

    pub(crate) fn peer_descriptor_bytes_max(&self) -> u64 {
        self.shared.config.limits.peer_descriptor_bytes_max
    }

    /// Refuses a segment of another engine.
    pub(crate) fn check_segment(&self, segment: &Segment) -> Result<(), EngineError> {
        if segment.engine() == self.id && segment.peer::<PeerHandle>().is_some() {
            return Ok(());
        }
        let name = segment.name().to_owned();
        Err(EngineError::ForeignSegment { name })
    }

    /// Decodes the descriptor of the peer called `name`.
    pub(crate) fn check_descriptor(
        &self,
        name: &str,
        text: &[u8],
    ) -> Result<Descriptor, EngineError> {
        Descriptor::decode_without_buffers(text).map_err(|source| EngineError::Descriptor {
            peer: name.to_owned(),
            source,
        })
    }

    /// Opens the peer that a store says is somewhere, or leads its open segment there. `ask` asks the store.
    ///
    /// Where another thread finds the peer elsewhere at the same time, the store is asked once more. If yet
    /// another is faster then, what that one leads the segment to was asked for after this call had begun.
    ///
    /// The link has no control addresses: a port where an engine of some name was may be another's by
    /// now, so that only the store is asked where the peer is.
    pub(crate) fn open_found(
        &self,
        name: &str,
        ask: impl Fn() -> Result<Found, EngineError>,
    ) -> Result<Segment, EngineError> {
        let known = self.open_already(name).map(|(segment, _)| segment);
        match self.look_and_lead(name, known, &ask)? {
            Led::There(segment) => Ok(segment),
            Led::ByAnother(segment) => match self.look_and_lead(name, Some(segment), &ask)? {
                Led::There(segment) | Led::ByAnother(segment) => Ok(segment),
            },
        }
    }

    fn look_and_lead(
        &self,
        name: &str,
        known: Option<Segment>,
        ask: impl Fn() -> Result<Found, EngineError>,
    ) -> Result<Led, EngineError> {
        let handle = known.as_ref().and_then(Segment::peer::<PeerHandle>);
        let since = handle.map(|handle| handle.link.opens());
        let found = ask()?;
        let (port, version) = (found.descriptor.data_port, found.descriptor.version);
        let endpoint = Endpoint {
            addresses: resolve_named(&found.host, port)?,
            host: Some(found.host),
            port,
            version,
        };
        let notify_name = found.descriptor.name;
        let segment = match known {
            Some(segment) => segment,
            None => match self.open_new(name, Vec::new(), notify_name, endpoint.clone()) {
                (segment, true) => return Ok(Led::There(segment)),
                (segment, false) => segment,
            },
        };
        let Some(handle) = segment.peer::<PeerHandle>() else {
            return Ok(Led::There(segment));
        };
        match handle.link.replace_since(endpoint, since) {
            Replaced::Overtaken => return Ok(Led::ByAnother(segment)),
            Replaced::Moved => self.say_that_moved(handle),
            Replaced::There => {}
        }
        Ok(Led::There(segment))
    }

    /// Opens the peer that has answered at `control`, or leads the segment that is open to where it is.
    pub(super) fn open_at(
        &self,
        name: &str,
        known: Option<Segment>,
        control: Vec<SocketAddr>,
        mut descriptor: Descriptor,
    ) -> Segment {
        let notify_name = std::mem::take(&mut descriptor.name);
        let endpoint = endpoint_of(name, &control, descriptor);
        let Some(segment) = known else {
            return self.open_new(name, control, notify_name, endpoint).0;
        };
        if let Some(handle) = segment.peer::<PeerHandle>()
            && handle.link.replace(endpoint)
        {
            self.say_that_moved(handle);
        }
        segment
    }

    fn say_that_moved(&self, handle: &PeerHandle) {
        // After shutdown there are no lanes left.
        let _ = self.shared.command(Command::Moved(handle.link.id));
    }

    /// Returns the segment of that name and whether it is new. Another thread may have been faster; then both
    /// use one set of connections.
    fn open_new(
        &self,
        name: &str,
        control: Vec<SocketAddr>,
        notify_name: String,
        endpoint: Endpoint,
    ) -> (Segment, bool) {
        let mut segments = self.segments();
        if let Some(segment) = segments.open.get(name).and_then(WeakSegment::upgrade) {
            return (segment, false);
        }
        let link = Arc::new(PeerLink::new(
            self.next_peer.fetch_add(1, Ordering::Relaxed),
            name.to_owned(),
            control,
            notify_name,
            endpoint,
        ));
        let handle = PeerHandle {
            link,
            shared: Arc::downgrade(&self.shared),
        };
        let segment = Segment::new(self.id, name.to_owned(), Box::new(handle));
        if segments.open.len() >= segments.sweep_at {
            segments
                .open
                .retain(|_, segment| segment.upgrade().is_some());
            segments.sweep_at = (segments.open.len() * 2).max(64);
        }
        segments.open.insert(name.to_owned(), segment.downgrade());
        (segment, true)
    }

    /// Sends a notification to the peer at `host`.
    pub(crate) fn notify_at(
        &self,
        host: &str,
        port: u16,
        peer: &str,
        name: &str,
        message: &str,
    ) -> Result<(), EngineError> {
        self.notify_addresses(resolve_named(host, port)?, peer, name, message)
    }

    pub(super) fn notify_addresses(
        &self,
        addresses: Vec<SocketAddr>,
        peer: &str,
        name: &str,
        message: &str,
    ) -> Result<(), EngineError> {
        let control = |source| EngineError::Control {
            peer: peer.to_owned(),
            source,
        };
        let text = Notice {
            name: name.to_owned(),
            message: message.to_owned(),
        }
        .encode();
        let len = text.len() as u64 + 1;
        if len > PEER_FRAME_BYTES_MAX {
            let error = FrameError::TooLong {
                len,
                max: PEER_FRAME_BYTES_MAX,
            };
            return Err(control(error.into()));
        }
        let reply = self
            .shared
            .exchange(addresses, FrameKind::Notify, text.into_bytes())
            .map_err(control)?;
        let reply = Notice::decode(&reply).map_err(|error: JsonError| control(error.into()))?;
        if reply.message.is_empty() {
            return Err(control(ControlError::NotifyRefused));
        }
        Ok(())
    }

    /// Asks whether the peer at `host` is alive.
    pub(crate) fn probe_at(&self, host: &str, port: u16, peer: &str) -> Result<(), EngineError> {
        self.probe_addresses(resolve_named(host, port)?, peer, self.control_waits())
    }

    /// Returns what a control exchange may wait for, as it is configured.
    pub(crate) fn control_waits(&self) -> Waits {
        self.shared.config.timeouts.waits()
    }

    /// Asks whether the peer called `name` is alive at one of `addresses`.
    pub(crate) fn probe_addresses(
        &self,
        addresses: Vec<SocketAddr>,
        name: &str,
        waits: Waits,
    ) -> Result<(), EngineError> {
        let control = |source| EngineError::Control {
            peer: name.to_owned(),
            source,
        };
        let reply = self
            .shared
            .exchange_within(addresses, FrameKind::Probe, PROBE_REQUEST.to_vec(), waits)
            .map_err(control)?;
        check_json(&reply).map_err(|error| control(error.into()))
    }
}

/// Where a metadata store says that a peer is.
pub(crate) struct Found {
    /// Host of the data listener, no wildcard.
    pub(crate) host: String,
    /// The rest; of its data host nothing is used.
    pub(crate) descriptor: Descriptor,
}

/// What has become of a segment that was to be led to where the store says that its peer is.
enum Led {
    There(Segment),
    /// Another thread has led it elsewhere meanwhile.
    ByAnother(Segment),
}

/// Where the data listener of a descriptor is, of a peer that answered at one of `control`.
fn endpoint_of(peer: &str, control: &[SocketAddr], descriptor: Descriptor) -> Endpoint {
    let port = descriptor.data_port;
    let host = dialable(descriptor.data_host);
    let addresses = match &host {
        None => at_port(control, port),
        Some(host) => match resolve_host(host, port) {
            Ok(addresses) => with_fallback(addresses, control),
            Err(error) => {
                tracing::warn!(peer, host, %error, "using the control host for data");
                at_port(control, port)
            }
        },
    };
    Endpoint {
        host,
        port,
        addresses,
        version: descriptor.version,
    }
}

/// Says whether whoever connects to `address` from this machine reaches a listener at `listener`.
fn is_served_by(
    listener: SocketAddr,
    address: SocketAddr,
    can_bind: impl Fn(SocketAddr) -> bool,
) -> bool {
    let (bind, address) = (listener.ip(), canonical(address));
    // A listener on every address of IPv6 serves IPv4 as well.
    let is_of_family = bind.is_ipv6() || address.is_ipv4();
    listener.port() == address.port()
        && (bind.to_canonical() == address.ip()
            || bind.is_unspecified() && is_of_family && is_of_this_machine(address, can_bind))
}

/// Returns the IPv4 address that a mapped one stands for; others as they are, with their scope.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

fn can_bind(address: SocketAddr) -> bool {
    UdpSocket::bind(address).is_ok()
}

/// Says whether a canonical address is one of this machine's, as far as can be told.
fn is_of_this_machine(mut address: SocketAddr, can_bind: impl Fn(SocketAddr) -> bool) -> bool {
    address.set_port(0);
    // Addresses of documentation, which no machine has: whoever can bind to them can bind to any
    // (`ip_nonlocal_bind`).
    let nobodys: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        SocketAddr::V6(_) => Ipv6Addr::new(0x2001, 0xDB8, 0, 0, 0, 0, 0, 1).into(),
    };
    can_bind(address) && !can_bind(SocketAddr::new(nobodys, 0))
}

fn resolve_named(host: &str, port: u16) -> Result<Vec<SocketAddr>, EngineError> {
    resolve_host(host, port).map_err(|source| EngineError::Resolve {
        host: host.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::tcp::TcpConfig;

    #[test]
    fn a_probe_ends_within_the_waits_that_it_is_given() {
        let engine = TcpEngine::start(TcpConfig::default()).unwrap();
        let short = Waits {
            connect: Duration::from_millis(60),
            reply: Duration::from_millis(40),
        };
        // Its connections are made, and nobody answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // Further connections are not made once so many wait to be accepted.
        let full =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
            .unwrap();
        full.listen(0).unwrap();
        let full: std::net::TcpListener = full.into();
        let mut fillers = Vec::new();
        let address = full.local_addr().unwrap();
        while let Ok(stream) =
            std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100))
        {
            fillers.push(stream);
        }
        let probe = |listener: &std::net::TcpListener| {
            let begin = Instant::now();
            let address = listener.local_addr().unwrap();
            let probed = engine.probe_addresses(vec![address], "peer", short);
            // Less than what is configured.
            assert!(begin.elapsed() < Duration::from_secs(4));
            match probed {
                Err(EngineError::Control { source, .. }) => source,
                probed => panic!("{probed:?}"),
            }
        };
        assert_eq!(
            probe(&silent),
            ControlError::ReplyTimeout { timeout_ms: 40 }
        );
        let endpoint = address;
        let timeout_ms = 60;
        assert_eq!(
            probe(&full),
            ControlError::ConnectTimeout {
                endpoint,
                timeout_ms
            }
        );
    }

    #[test]
    fn a_listener_on_every_address_serves_those_of_this_machine_at_its_port() {
        let check = |listener: &str, address: &str, expected: bool| {
            let (listener, address) = (listener.parse().unwrap(), address.parse().unwrap());
            let found = is_served_by(listener, address, can_bind);
            assert_eq!(found, expected, "{listener} {address}");
        };
        check("127.0.0.1:7", "127.0.0.1:7", true);
        check("127.0.0.1:7", "[::ffff:127.0.0.1]:7", true);
        check("127.0.0.1:7", "127.0.0.2:7", false);
        for every in ["0.0.0.0:7", "[::]:7"] {
            check(every, "127.0.0.1:7", true);
            check(every, "127.0.0.2:7", true);
            check(every, "127.0.0.1:8", false);
            // Of documentation, and so nobody's.
            check(every, "192.0.2.1:7", false);
            check(every, "198.51.100.1:7", false);
            check(every, "[2001:db8::1]:7", false);
        }
        check("0.0.0.0:7", "[::1]:7", false);
    }

    #[test]
    fn where_any_address_of_a_family_can_be_bound_to_none_of_it_is_known_as_our_own() {
        // As with `ip_nonlocal_bind` of one family and not of the other.
        let check = |is_v4: bool, address: &str, expected: bool| {
            let can_bind = |address: SocketAddr| {
                let is_own = address.ip().to_canonical().is_loopback();
                is_own || address.ip().to_canonical().is_ipv4() == is_v4
            };
            let found = is_served_by(
                "[::]:7".parse().unwrap(),
                address.parse().unwrap(),
                can_bind,
            );
            assert_eq!(found, expected, "{address}, any of IPv4: {is_v4}");
        };
        for address in [
            "127.0.0.1:7",
            "[::ffff:127.0.0.1]:7",
            "198.51.100.1:7",
            "[::ffff:198.51.100.1]:7",
        ] {
            check(true, address, false);
        }
        check(true, "[::1]:7", true);
        check(true, "[2001:db8::2]:7", false);
        for address in ["[::1]:7", "[2001:db8::2]:7"] {
            check(false, address, false);
        }
        check(false, "[::ffff:127.0.0.1]:7", true);
        check(false, "[::ffff:198.51.100.1]:7", false);
    }
}
