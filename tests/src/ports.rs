//! Ports of loopback for servers that are other programs, and listen a while after a test has chosen their port.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Lowest port, and number of ports. By default the kernel gives none of them to a socket by itself
/// (`net.ipv4.ip_local_port_range`), so no other program takes one between the choice and the begin of its server. Nor
/// is one the own port of a client, which could connect to itself while no server listens.
const FIRST_PORT: u16 = 12_000;
const PORTS: usize = 20_000;
/// Distance of the first ports of two processes with subsequent ids.
const PORTS_OF_A_PROCESS: usize = 64;

/// Returns a port of 127.0.0.1 on which nothing listens. Each call in a process returns another one.
pub fn unused_port() -> u16 {
    static CHOSEN: AtomicUsize = AtomicUsize::new(0);
    let begin = std::process::id() as usize * PORTS_OF_A_PROCESS;
    let next_port = || {
        let position = (begin + CHOSEN.fetch_add(1, Ordering::Relaxed)) % PORTS;
        FIRST_PORT + u16::try_from(position).expect("fewer than 65,536 ports")
    };
    let is_unused = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let mut ports = std::iter::repeat_with(next_port).take(PORTS);
    ports.find(is_unused).expect("an unused port")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_call_returns_another_port_on_which_a_server_can_listen() {
        let chosen: Vec<u16> = (0..20).map(|_| unused_port()).collect();
        let different: BTreeSet<&u16> = chosen.iter().collect();
        assert_eq!(different.len(), chosen.len(), "{chosen:?}");
        for port in chosen {
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("an unused port");
        }
    }
}
