//! What an engine knows of one peer: the part that segments share with the reactor.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use super::shared::{Command, Shared};
use crate::batch::Reason;
use crate::wire::data::DataVersion;
use crate::wire::descriptor::Descriptor;
use crate::wire::name::is_wildcard;

/// Identity of one opened peer within its engine.
pub(super) type PeerId = u64;

/// Where a peer's data listener is.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    /// Host as the descriptor names it; `None`: the control host.
    pub(super) host: Option<String>,
    pub(super) port: u16,
    /// Addresses of the host, to be tried in turn; never empty.
    pub(super) addresses: Vec<SocketAddr>,
    /// What the peer speaks there.
    pub(super) version: DataVersion,
}

impl Endpoint {
    /// Says whether connections to `other` would do for this one: in which order a resolver lists the
    /// addresses of a host changes from call to call.
    fn is_same(&self, other: &Self) -> bool {
        let holds = |a: &Self, b: &Self| a.addresses.iter().all(|at| b.addresses.contains(at));
        self.host == other.host
            && self.port == other.port
            && self.version == other.version
            && holds(self, other)
            && holds(other, self)
    }
}

/// Where a peer is, as far as is known.
#[derive(Debug)]
struct Place {
    endpoint: Endpoint,
    /// How often `open_segment` has said where the peer is.
    opens: u64,
    /// Why `endpoint` is out of date, until the segment is opened again.
    stale: Option<Stale>,
}

#[derive(Debug)]
enum Stale {
    /// The peer has moved to a host that the reactor cannot resolve. Whoever is at the endpoint now is
    /// not to be written to.
    Elsewhere(Reason),
    /// The peer's descriptor is too long for the reactor; the peer may be where it was.
    Unread,
}

/// What has come of an answer about where a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replaced {
    /// The peer is where it was.
    There,
    /// Lanes lead elsewhere.
    Moved,
    /// Not used: another call has been faster and found the peer elsewhere, so that it is not known which of the
    /// two answers is the newer.
    Overtaken,
}

/// The part of an opened peer that segments share with the reactor.
pub(super) struct PeerLink {
    pub(super) id: PeerId,
    /// The name the segment was opened by.
    pub(super) name: String,
    /// Addresses of the control listener, to be tried in turn; none if only a metadata store says
    /// where the peer is.
    pub(super) control: Vec<SocketAddr>,
    /// Where notifications go: the name in the descriptor.
    pub(super) notify_name: String,
    place: Mutex<Place>,
}

impl PeerLink {
    pub(super) fn new(
        id: PeerId,
        name: String,
        control: Vec<SocketAddr>,
        notify_name: String,
        endpoint: Endpoint,
    ) -> Self {
        Self {
            id,
            name,
            control,
            notify_name,
            place: Mutex::new(Place {
                endpoint,
                opens: 1,
                stale: None,
            }),
        }
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the addresses to connect lanes to and what is spoken there, or why there are none.
    pub(super) fn addresses(&self) -> Result<(Vec<SocketAddr>, DataVersion), Reason> {
        let place = self.place();
        let endpoint = &place.endpoint;
        match &place.stale {
            Some(Stale::Elsewhere(reason)) => Err(reason.clone()),
            Some(Stale::Unread) | None => Ok((endpoint.addresses.clone(), endpoint.version)),
        }
    }

    /// Says whether the descriptor has to be fetched by `open_segment`.
    pub(super) fn is_stale(&self) -> bool {
        self.place().stale.is_some()
    }

    /// Notes that the reactor could not read the peer's descriptor.
    pub(super) fn note_unread(&self) {
        self.place().stale.get_or_insert(Stale::Unread);
    }

    /// Returns how often `open_segment` has said where the peer is.
    pub(super) fn opens(&self) -> u64 {
        self.place().opens
    }

    /// Takes over what `open_segment` found. Returns whether lanes lead elsewhere.
    pub(super) fn replace(&self, endpoint: Endpoint) -> bool {
        self.place().replace(endpoint)
    }

    /// As `replace`, of what was asked for after `since` opens.
    pub(super) fn replace_since(&self, endpoint: Endpoint, since: Option<u64>) -> Replaced {
        let mut place = self.place();
        let is_there = place.stale.is_none() && place.endpoint.is_same(&endpoint);
        if !is_there && Some(place.opens) != since {
            return Replaced::Overtaken;
        }
        if place.replace(endpoint) {
            Replaced::Moved
        } else {
            Replaced::There
        }
    }

    /// Takes over where a new descriptor says the data listener is, without resolving names.
    /// Returns whether it has moved, or speaks another version.
    pub(super) fn update(&self, descriptor: &Descriptor) -> Result<bool, Reason> {
        let mut place = self.place();
        let endpoint = &place.endpoint;
        let data_host = dialable(descriptor.data_host.clone());
        let port = descriptor.data_port;
        let version = descriptor.version;
        let is_there = endpoint.host == data_host && endpoint.port == port;
        if is_there && endpoint.version == version {
            place.stale = None;
            return Ok(false);
        }
        let addresses = match &data_host {
            host if *host == endpoint.host => at_port(&endpoint.addresses, port),
            None => at_port(&self.control, port),
            Some(host) => match host.parse() {
                Ok(address) => with_fallback(vec![SocketAddr::new(address, port)], &self.control),
                Err(_) => {
                    let reason = Reason::Unresolved { host: host.clone() };
                    place.stale = Some(Stale::Elsewhere(reason.clone()));
                    return Err(reason);
                }
            },
        };
        place.endpoint = Endpoint {
            host: data_host,
            port,
            addresses,
            version,
        };
        place.stale = None;
        Ok(true)
    }
}

impl Place {
    fn replace(&mut self, endpoint: Endpoint) -> bool {
        self.opens += 1;
        self.stale = None;
        let moved = !self.endpoint.is_same(&endpoint);
        if moved {
            self.endpoint = endpoint;
        }
        moved
    }
}

/// Drops a wildcard address, which nobody can dial.
pub(super) fn dialable(host: Option<String>) -> Option<String> {
    host.filter(|host| !is_wildcard(host))
}

/// Returns the hosts of `addresses`, each with `port`.
pub(super) fn at_port(addresses: &[SocketAddr], port: u16) -> Vec<SocketAddr> {
    addresses
        .iter()
        .map(|address| SocketAddr::new(address.ip(), port))
        .collect()
}

/// Adds the hosts that answered for control, in case the advertised data host cannot be reached.
pub(super) fn with_fallback(mut data: Vec<SocketAddr>, control: &[SocketAddr]) -> Vec<SocketAddr> {
    if let Some(port) = data.first().map(SocketAddr::port) {
        for address in at_port(control, port) {
            if !data.contains(&address) {
                data.push(address);
            }
        }
    }
    data
}

/// What a segment remembers: the link, and the duty to tell the reactor when the last user is gone.
pub(super) struct PeerHandle {
    pub(super) link: std::sync::Arc<PeerLink>,
    pub(super) shared: Weak<Shared>,
}

impl Drop for PeerHandle {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            // After shutdown there is nothing left to forget.
            let _ = shared.command(Command::Forget(self.link.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(host: Option<&str>) -> PeerLink {
        let control = vec!["10.0.0.1:15000".parse().unwrap()];
        let endpoint = Endpoint {
            host: host.map(str::to_owned),
            port: 7,
            addresses: at_port(&control, 7),
            version: DataVersion::V2,
        };
        PeerLink::new(0, "10.0.0.1:15000".into(), control, String::new(), endpoint)
    }

    fn descriptor(host: Option<&str>, port: u16) -> Descriptor {
        Descriptor {
            name: String::new(),
            data_host: host.map(str::to_owned),
            data_port: port,
            version: DataVersion::V2,
            buffers: Vec::new(),
            timestamp: String::new(),
        }
    }

    #[test]
    fn a_new_descriptor_moves_the_endpoint_without_resolving_names() {
        let addresses = |link: &PeerLink| -> Vec<String> {
            link.place()
                .endpoint
                .addresses
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        let peer = link(Some("worker"));
        assert_eq!(peer.update(&descriptor(Some("worker"), 7)), Ok(false));
        assert_eq!(peer.update(&descriptor(Some("worker"), 8)), Ok(true));
        assert_eq!(addresses(&peer), ["10.0.0.1:8"]);
        assert_eq!(peer.update(&descriptor(Some("10.0.0.2"), 9)), Ok(true));
        assert_eq!(addresses(&peer), ["10.0.0.2:9", "10.0.0.1:9"]);
        assert_eq!(
            peer.update(&descriptor(Some("other"), 9)),
            Err(Reason::Unresolved {
                host: "other".into()
            })
        );
        assert_eq!(addresses(&peer), ["10.0.0.2:9", "10.0.0.1:9"]);
    }

    #[test]
    fn nothing_is_sent_to_where_a_peer_was_until_it_has_been_found() {
        let peer = link(Some("worker"));
        let found = Endpoint {
            host: Some("other".into()),
            port: 9,
            addresses: vec!["10.0.0.2:9".parse().unwrap()],
            version: DataVersion::V2,
        };
        let elsewhere = Reason::Unresolved {
            host: "other".into(),
        };
        assert_eq!(
            peer.update(&descriptor(Some("other"), 9)),
            Err(elsewhere.clone())
        );
        assert_eq!(peer.addresses(), Err(elsewhere));
        peer.note_unread();
        assert!(peer.addresses().is_err());
        assert!(peer.replace(found.clone()));
        assert_eq!(
            peer.addresses(),
            Ok((found.addresses.clone(), DataVersion::V2))
        );
        assert!(!peer.is_stale() && !peer.replace(found));
        // It may also come back to where it was.
        assert!(peer.update(&descriptor(Some("third"), 9)).is_err());
        assert_eq!(peer.update(&descriptor(Some("other"), 9)), Ok(false));
        assert!(peer.addresses().is_ok() && !peer.is_stale());
        // A descriptor that was not read says nothing about the peer.
        peer.note_unread();
        assert!(peer.addresses().is_ok() && peer.is_stale());
    }

    fn at(addresses: &[&str]) -> Endpoint {
        Endpoint {
            host: Some("worker".into()),
            port: 7,
            addresses: addresses.iter().map(|at| at.parse().unwrap()).collect(),
            version: DataVersion::V2,
        }
    }

    #[test]
    fn addresses_in_another_order_are_no_other_place() {
        let peer = link(Some("worker"));
        assert!(peer.replace(at(&["10.0.0.2:7", "10.0.0.3:7"])));
        assert!(!peer.replace(at(&["10.0.0.3:7", "10.0.0.2:7"])));
        assert!(peer.replace(at(&["10.0.0.3:7"])));
        assert!(peer.replace(at(&["10.0.0.3:7", "10.0.0.2:7"])));
    }

    #[test]
    fn what_a_slower_call_has_found_does_not_replace_what_a_faster_one_has() {
        let (old, new) = (["10.0.0.2:7"], ["10.0.0.3:7"]);
        let peer = link(Some("worker"));
        let since = Some(peer.opens());
        assert_eq!(peer.replace_since(at(&new), since), Replaced::Moved);
        assert_eq!(peer.replace_since(at(&old), since), Replaced::Overtaken);
        assert_eq!(peer.replace_since(at(&old), None), Replaced::Overtaken);
        assert_eq!(peer.addresses().unwrap().0, at(&new).addresses);
        // Where both have found the same, nobody has to ask again.
        assert_eq!(peer.replace_since(at(&new), since), Replaced::There);
        assert_eq!(
            peer.replace_since(at(&old), Some(peer.opens())),
            Replaced::Moved
        );
    }

    // row: W7.3e
    #[test]
    fn a_peer_that_speaks_another_version_now_is_spoken_to_in_that() {
        let peer = link(Some("worker"));
        let mut older = descriptor(Some("worker"), 7);
        older.version = DataVersion::V1;
        for (descriptor, moved) in [(&older, true), (&older, false)] {
            assert_eq!(peer.update(descriptor), Ok(moved));
            let (addresses, version) = peer.addresses().unwrap();
            assert_eq!(addresses, ["10.0.0.1:7".parse().unwrap()]);
            assert_eq!(version, DataVersion::V1);
        }
        assert_eq!(peer.update(&descriptor(Some("worker"), 7)), Ok(true));
        assert_eq!(peer.addresses().unwrap().1, DataVersion::V2);
    }

    // row: W5.2b
    #[test]
    fn a_wildcard_as_data_host_means_the_host_that_answered_for_control() {
        for wildcard in ["0.0.0.0", "::", "[::]"] {
            assert_eq!(dialable(Some(wildcard.into())), None, "{wildcard}");
            let peer = link(None);
            assert_eq!(peer.update(&descriptor(Some(wildcard), 7)), Ok(false));
        }
        assert_eq!(dialable(Some("::1".into())), Some("::1".into()));
    }
}
