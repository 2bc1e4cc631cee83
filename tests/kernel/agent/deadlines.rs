//! Shell: requests to a pod that take longer than they may: their connections are ended, and no others.

use std::thread::JoinHandle;

use super::{
    server::{UPGRADE, ask, scene},
    *,
};

/// How long requests may take here.
const TIMEOUT: Duration = Duration::from_secs(2);
const ENDED: &str = "rouse_agent_deadlines_ended_total";

impl World {
    /// Sends a request on a connection of its own, reads until that ends, and says how much came before.
    fn asks(&self, path: &str) -> JoinHandle<(usize, ErrorKind)> {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n{UPGRADE}\r\n").expect("it stands");
        thread::spawn(move || {
            let (mut came, mut bytes) = (0, [0; 1024]);
            loop {
                match stream.read(&mut bytes) {
                    Ok(0) => return (came, ErrorKind::UnexpectedEof),
                    Ok(read) => came += read,
                    Err(error) => return (came, error.kind()),
                }
            }
        })
    }
}

#[test]
fn only_the_connections_of_requests_that_take_too_long_are_ended() {
    let world = scene("overdue", TIMEOUT);
    let (mut kept, mut unused, mut foreign) = (world.connect(), world.connect(), world.connect());
    foreign.write_all(b"\x16\x03").expect("it stands");
    ask(&mut kept, "/quick");
    let long = ["/hang", "/drip", "/upgrade"].map(|path| world.asks(path));
    // Older than the long requests, in use all the time, and there when they are over: its time is each request's own.
    while long.iter().any(|it| !it.is_finished()) {
        ask(&mut kept, "/quick");
    }
    let [hang, drip, upgrade] = long.map(|it| it.join().expect("no panic"));
    assert_eq!(hang, (0, ErrorKind::ConnectionReset));
    assert!(drip.0 > 0 && upgrade.0 > 0, "their answers had begun");
    assert_eq!([drip.1, upgrade.1], [ErrorKind::ConnectionReset; 2]);
    ask(&mut kept, "/quick");
    ask(&mut unused, "/quick");
    let mut back = [0; 2];
    foreign.read_exact(&mut back).expect("it stands");
    assert_eq!(back, *b"\x16\x03", "nobody knows what it does");
    world.wait_counted(ENDED, 3);
    let page = world.metrics();
    assert!(page.contains(&format!("{ENDED} 3\n")), "{page}");
    assert!(page.contains("rouse_agent_deadlines_kept 1\n"), "{page}");
    let pins = world.folder.join(format!("bpf/v{}", abi::ABI_VERSION));
    let state = Maps::open(&pins).expect("pinned maps").state(world.slot());
    assert_eq!((state.in_flight, state.connections), (1, 3), "the foreign one: {state:?}");
}

#[test]
fn a_request_from_before_the_agent_began_is_ended_too() {
    let mut world = scene("overdue-anew", TIMEOUT);
    world.kill_agent();
    let hang = world.asks("/hang");
    world.start_agent();
    assert_eq!(hang.join().expect("no panic"), (0, ErrorKind::ConnectionReset));
}
