//! Shell: a process of a test, which acts on UDP sockets. Each line on stdin is one step, as in `scripted_process`.
//!
//! | line | effect | reply |
//! |---|---|---|
//! | `serve ADDRESS NAME` | binds, answers each datagram with NAME | `ok` |
//! | `resolve ADDRESS IPV4` | binds, answers each DNS query for an address with IPV4 | `ok` |
//! | `open4`, `open6` | opens a socket without connecting it | `ok` |
//! | `connect ADDRESS` | opens a socket, connects it | `ok PEER` |
//! | `reconnect ADDRESS` | connects the socket that was opened last | `ok PEER` |
//! | `disconnect` | disconnects the socket that was opened last | `ok` |
//! | `peer` | reads the peer address of the socket that was opened last | `ok PEER` |
//! | `ask ADDRESS…` | sends a datagram to each address, then receives as many | `ok NAME SOURCE …` by name |
//! | `ask` | sends a datagram to the peer, then receives one | `ok NAME SOURCE` |
//! | `ask-briefly [ADDRESS]` | as `ask`, for an answer that must not come | `ok NAME SOURCE` |
//! | `connected ADDRESS N` | asks by N new sockets that it connects | `ok NAME=COUNT …` |
//! | `unconnected ADDRESS N` | asks by N new sockets that it does not connect | `ok NAME=COUNT …` |
//! | `drop` | closes all sockets but those of servers | `ok` |
//!
//! A datagram that is not answered is errno 11 (EAGAIN).

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use crate::{
    fixture::NetnsFixture,
    scripted_process::{ScriptedProcess, run_steps},
    sys,
};

const ROLE: &str = "ROUSE_TEST_UDP";
/// Time after which a datagram counts as not answered. On a busy machine the server may wait for seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which an answer is awaited that must not come.
const ABSENCE_TIME: Duration = Duration::from_secs(3);
/// Length of the header of a DNS message.
const DNS_HEADER: usize = 12;

/// Main function of this program as such a process, which the tests start. It is not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut sockets = UdpSockets::default();
    run_steps(|words| sockets.run(words));
}

/// Starts a process in the cgroup and namespace of a client or pod.
pub(crate) fn start_in(netns: &NetnsFixture) -> ScriptedProcess {
    let variable = (ROLE, OsStr::new("1"));
    ScriptedProcess::start_role("udp_process::role", variable, &netns.cgroup, &netns.netns)
}

#[derive(Default)]
struct UdpSockets(Vec<UdpSocket>);

impl UdpSockets {
    fn run(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["serve", address, name] => {
                let name = (*name).to_owned();
                serve(address, move |_| name.clone().into_bytes())?;
            }
            ["resolve", address, answer] => {
                let answer: Ipv4Addr = answer.parse().map_err(io::Error::other)?;
                serve(address, move |query| dns_response(query, answer))?;
            }
            ["open4"] => self.0.push(open(Ipv4Addr::UNSPECIFIED.into())?),
            ["open6"] => self.0.push(open(Ipv6Addr::UNSPECIFIED.into())?),
            ["connect", address] => {
                let address = parse(address)?;
                let socket = open(unspecified(address))?;
                socket.connect(address)?;
                let peer = socket.peer_addr();
                self.0.push(socket);
                return Ok(peer?.to_string());
            }
            ["reconnect", address] => {
                let socket = self.last()?;
                socket.connect(parse(address)?)?;
                return Ok(socket.peer_addr()?.to_string());
            }
            ["disconnect"] => sys::disconnect(self.last()?)?,
            ["peer"] => return Ok(self.last()?.peer_addr()?.to_string()),
            ["ask", addresses @ ..] => return ask(self.last()?, addresses),
            ["ask-briefly", addresses @ ..] => {
                let socket = self.last()?;
                socket.set_read_timeout(Some(ABSENCE_TIME))?;
                let answer = ask(socket, addresses);
                socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                return answer;
            }
            ["connected", address, count] => {
                let address = parse(address)?;
                return count_answers(count, || {
                    let socket = open(unspecified(address))?;
                    socket.connect(address)?;
                    ask(&socket, &[])
                });
            }
            ["unconnected", address, count] => {
                let to = parse(address)?;
                return count_answers(count, || ask(&open(unspecified(to))?, &[*address]));
            }
            ["drop"] => self.0.clear(),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(String::new())
    }

    fn last(&self) -> io::Result<&UdpSocket> {
        self.0.last().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

fn parse(address: &str) -> io::Result<SocketAddr> {
    address.parse().map_err(io::Error::other)
}

/// Returns the address to which a socket is bound that sends to this one.
fn unspecified(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

fn open(address: IpAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((address, 0))?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(socket)
}

/// Sends a datagram to each address, or to the peer, and returns the answers with their sources, by name.
fn ask(socket: &UdpSocket, addresses: &[&str]) -> io::Result<String> {
    for address in addresses {
        socket.send_to(b"?", parse(address)?)?;
    }
    if addresses.is_empty() {
        socket.send(b"?")?;
    }
    let mut answers = Vec::new();
    for _ in 0..addresses.len().max(1) {
        let mut answer = [0; 64];
        let (length, source) = socket.recv_from(&mut answer)?;
        answers.push(format!("{} {source}", String::from_utf8_lossy(&answer[..length])));
    }
    answers.sort_unstable();
    Ok(answers.join(" "))
}

/// Asks so many times, and counts the answers by name.
fn count_answers(count: &str, ask: impl Fn() -> io::Result<String>) -> io::Result<String> {
    let mut counts = BTreeMap::<String, u32>::new();
    for _ in 0..count.parse().map_err(io::Error::other)? {
        let answer = ask()?;
        let name = answer.split(' ').next().unwrap_or_default();
        *counts.entry(name.to_owned()).or_default() += 1;
    }
    let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{name}={count}")).collect();
    Ok(counts.join(" "))
}

/// Answers each datagram by a thread of its own until the process ends.
fn serve(address: &str, answer: impl Fn(&[u8]) -> Vec<u8> + Send + 'static) -> io::Result<()> {
    let socket = UdpSocket::bind(parse(address)?)?;
    std::thread::spawn(move || {
        let mut datagram = [0; 512];
        while let Ok((length, client)) = socket.recv_from(&mut datagram) {
            let _client_left = socket.send_to(&answer(&datagram[..length]), client);
        }
    });
    Ok(())
}

/// Returns the response to a DNS query with one question (RFC 1035): one address for a query of type A, else none.
fn dns_response(query: &[u8], address: Ipv4Addr) -> Vec<u8> {
    /// Type and class of a question for an IPv4 address.
    const TYPE_A_IN: [u8; 4] = [0, 1, 0, 1];
    let name = query.iter().skip(DNS_HEADER).take_while(|byte| **byte != 0).count() + 1;
    let Some(question) = query.get(DNS_HEADER..DNS_HEADER + name + 4) else { return Vec::new() };
    let has_answer = question.ends_with(&TYPE_A_IN);
    // The query's number; a response with recursion; one question, the answers, no other records.
    let mut response = query[..2].to_vec();
    response.extend([0x81, 0x80, 0, 1, 0, u8::from(has_answer), 0, 0, 0, 0]);
    response.extend(question);
    if has_answer {
        // A pointer to the name of the question, its type and class, 60 s, four bytes.
        response.extend([0xc0, DNS_HEADER as u8]);
        response.extend(TYPE_A_IN);
        response.extend([0, 0, 0, 60, 0, 4]);
        response.extend(address.octets());
    }
    response
}

#[test]
fn a_query_for_an_address_is_answered_with_it() {
    let query = |kind| vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 0, 0, kind, 0, 1];
    let response = dns_response(&query(1), Ipv4Addr::new(1, 2, 3, 4));
    assert_eq!((&response[..2], &response[6..8]), (&[7, 9][..], &[0, 1][..]));
    assert!(response.ends_with(&[0, 4, 1, 2, 3, 4]), "{response:?}");
    let response = dns_response(&query(28), Ipv4Addr::new(1, 2, 3, 4));
    assert_eq!((&response[6..8], response.len()), (&[0, 0][..], query(28).len()));
    assert_eq!(dns_response(&[0; 5], Ipv4Addr::LOCALHOST), [0; 0]);
}
