//! The control connections of one thread.

use std::time::Duration;

use crate::control::{ControlAddress, ControlClient, ControlContext};

/// Connections kept by all threads of a producer together, as long as it has no more threads than this.
///
/// Each is three of the message library's sockets (the request's, its monitor's, and the one that listens to the
/// monitor), and a context allows 1,023. 128 threads with one connection each come to 384 of them and 512 file
/// descriptors, which is why there are no more threads; 64 connections of fewer threads to half of that.
const CLIENTS_MAX: usize = 64;
/// Connections kept by a thread.
const CLIENTS_PER_THREAD_MAX: usize = 16;
/// Most threads of a producer.
pub(super) const THREADS_MAX: usize = 128;

/// Request sockets, which belong to one thread each. The one used longest ago makes way for another consumer.
pub(super) struct Clients {
    context: ControlContext,
    max: usize,
    /// By last use, the last one used at the end.
    by_use: Vec<ControlClient>,
}

impl Clients {
    /// None yet, for one of `threads` threads that share `context`.
    pub(super) fn new(context: ControlContext, threads: usize) -> Self {
        Self {
            context,
            max: (CLIENTS_MAX / threads.max(1)).clamp(1, CLIENTS_PER_THREAD_MAX),
            by_use: Vec::new(),
        }
    }

    /// The client of `address`, to wait for `timeout`. O(clients kept).
    pub(super) fn get(
        &mut self,
        address: &ControlAddress,
        timeout: Duration,
    ) -> &mut ControlClient {
        let known = self
            .by_use
            .iter()
            .position(|client| client.address() == address);
        let mut client = match known {
            Some(index) => self.by_use.remove(index),
            None => {
                if self.by_use.len() >= self.max {
                    self.by_use.remove(0);
                }
                ControlClient::new(&self.context, address.clone(), timeout)
            }
        };
        client.set_timeout(timeout);
        let last = self.by_use.len();
        self.by_use.push(client);
        &mut self.by_use[last]
    }

    /// Closes all: a request may have been under way, and its socket cannot be used again.
    pub(super) fn clear(&mut self) {
        self.by_use.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::control::ClientError;

    #[test]
    fn ninety_consumers_fit_the_message_library_whatever_the_number_of_threads() {
        // Nobody listens: the port was free a moment ago, and is asked for under many addresses of this machine.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.local_addr())
            .unwrap()
            .port();
        for (threads, addresses) in [(4, 90), (THREADS_MAX, 1)] {
            let context = ControlContext::new();
            let mut all: Vec<_> = (0..threads)
                .map(|_| Clients::new(context.clone(), threads))
                .collect();
            for clients in &mut all {
                for host in 1..=addresses {
                    let address = ControlAddress::new(Ipv4Addr::new(127, 0, 9, host).into(), port);
                    let client = clients.get(&address, Duration::from_secs(10));
                    client.set_fail_fast(true);
                    let error = client.peers().unwrap_err();
                    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
                }
            }
        }
    }

    #[test]
    fn the_client_used_longest_ago_makes_way() {
        let mut clients = Clients::new(ControlContext::new(), 32);
        let address = |port| ControlAddress::new(Ipv4Addr::LOCALHOST.into(), port);
        let ports = |clients: &Clients| -> Vec<u16> {
            clients
                .by_use
                .iter()
                .map(|client| client.address().port())
                .collect()
        };
        clients.get(&address(1), Duration::ZERO);
        clients.get(&address(2), Duration::ZERO);
        clients.get(&address(1), Duration::ZERO);
        assert_eq!(ports(&clients), [2, 1]);
        clients.get(&address(3), Duration::ZERO);
        assert_eq!(ports(&clients), [1, 3]);
        clients.clear();
        assert!(ports(&clients).is_empty());
    }
}
