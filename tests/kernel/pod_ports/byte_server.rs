//! Shell: a server of bytes in a pod. Each step is one call on its newest connection, so a test decides the order of
//! all that both ends do.
//!
//! | line | effect | reply |
//! |---|---|---|
//! | `listen PORT [deferred]` | listens, for connections that have brought bytes if deferred | `ok` |
//! | `accept` | accepts the next connection, and keeps it | `ok` |
//! | `send TEXT` | sends bytes | `ok` |
//! | `receive` | receives the next bytes | `ok TEXT`; no text at their end |
//! | `finish` | ends its direction, and still receives | `ok` |
//! | `close` | closes the connection | `ok` |
//! | `reset` | resets the connection | `ok` |

use std::{
    ffi::OsStr,
    io::{self, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    time::Duration,
};

use nix::libc;
use socket2::SockRef;

use crate::{
    fixture::NetnsFixture,
    scripted_process::{ScriptedProcess, run_steps},
    sys,
};

const ROLE: &str = "ROUSE_TEST_BYTE_SERVER";
/// Time for which a deferred listener waits for bytes, in seconds.
const DEFER_SECONDS: i32 = 30;

/// Main function of this program as the server; not a test itself.
#[test]
#[ignore = "a role, run by the other tests"]
fn role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut sockets = ByteServerSockets::default();
    run_steps(|words| sockets.run(words));
}

/// Starts a server in a pod, killed on drop. `listen` has the rest of the step of that name.
pub(super) fn start(pod: &NetnsFixture, listen: &str) -> ScriptedProcess {
    let role = (ROLE, OsStr::new("1"));
    let mut server =
        ScriptedProcess::start_role("pod_ports::byte_server::role", role, &pod.cgroup, &pod.netns);
    server.expect_step(&format!("listen {listen}"));
    server
}

#[derive(Default)]
struct ByteServerSockets {
    listener: Option<TcpListener>,
    connections: Vec<TcpStream>,
}

impl ByteServerSockets {
    fn run(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["listen", port, options @ ..] => {
                let port: u16 = port.parse().map_err(io::Error::other)?;
                let listener = TcpListener::bind(("0.0.0.0", port))?;
                if options.contains(&"deferred") {
                    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT);
                    sys::set_option(&listener, level, name, DEFER_SECONDS)?;
                }
                self.listener = Some(listener);
            }
            ["accept"] => {
                let listener = self.listener.as_ref().ok_or(io::ErrorKind::NotFound)?;
                self.connections.push(listener.accept()?.0);
            }
            ["send", text] => self.newest()?.write_all(text.as_bytes())?,
            ["receive"] => {
                let mut bytes = [0; 4_096];
                let count = self.newest()?.read(&mut bytes)?;
                return Ok(String::from_utf8_lossy(&bytes[..count]).into_owned());
            }
            ["finish"] => self.newest()?.shutdown(Shutdown::Write)?,
            ["close"] => drop(self.connections.pop()),
            ["reset"] => {
                SockRef::from(self.newest()?).set_linger(Some(Duration::ZERO))?;
                drop(self.connections.pop());
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(String::new())
    }

    fn newest(&self) -> io::Result<&TcpStream> {
        self.connections.last().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}
