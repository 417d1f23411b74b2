//! Where an engine listens, from the name that it was created with.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use mooncake_transport::EngineError;
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::wire::name::PeerName;

/// Starts the engine that is called `local_server_name`; a port in it is ignored, as the P2P handshake
/// wants it.
pub(crate) fn start(local_server_name: &str) -> Result<TcpEngine, EngineError> {
    let name = PeerName::parse(local_server_name).map_err(|source| EngineError::PeerName {
        name: local_server_name.to_owned(),
        source,
    })?;
    let mut config = TcpConfig::default();
    let mut everywhere = false;
    match bind(name.host()) {
        Some(address) => config.bind = address,
        None => {
            everywhere = true;
            config.bind = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        }
    }
    if name.host().parse::<IpAddr>().is_err() {
        config.advertise = Some(name.host().to_owned());
    }
    match TcpEngine::start(config.clone()) {
        // A machine without IPv6.
        Err(EngineError::Bind { .. }) if everywhere => {
            config.bind = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
            TcpEngine::start(config)
        }
        started => started,
    }
}

/// The address that the host is; none if only a resolver knows, which may say something else at the
/// peers.
fn bind(host: &str) -> Option<IpAddr> {
    if host.eq_ignore_ascii_case("localhost") {
        return Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    host.parse().ok()
}

#[cfg(test)]
mod tests {
    use mooncake_transport::Engine;

    use super::*;

    #[test]
    fn an_address_is_bound_and_a_name_is_advertised() {
        assert!(
            start("127.0.0.1")
                .unwrap()
                .session()
                .starts_with("127.0.0.1:")
        );
        assert!(
            start("127.0.0.1:notaport")
                .unwrap()
                .session()
                .starts_with("127.0.0.1:")
        );
        let engine = start("localhost:1").unwrap();
        assert!(engine.session().starts_with("localhost:"));
        assert!(engine.control_address().ip().is_loopback());
        let engine = start("some-host").unwrap();
        assert!(engine.session().starts_with("some-host:"));
        assert!(engine.control_address().ip().is_unspecified());
    }

    #[test]
    fn names_that_nobody_can_dial_are_refused() {
        for name in ["", "/", "a b", "0.0.0.0", "::", "[::]:5"] {
            assert!(start(name).is_err(), "{name:?}");
        }
    }
}
