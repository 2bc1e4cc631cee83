//! Shell: responses sent by every system call that sends.

use aya::util::KernelVersion;

use super::{
    ANY_ADDRESS, RobustnessFixture, get_request, io_uring_server::SEND_METHODS, send_and_read,
    served_connection::SendMethod,
};
use crate::fixture::SERVING_PORT;

/// Lengths of responses: within a packet, of several packets, and longer than any buffer.
const LENGTHS: [usize; 4] = [1, 1_000, 100_000, 5_000_000];

#[test]
fn responses_sent_by_any_system_call_are_read_to_their_ends() {
    let fixture = RobustnessFixture::new();
    let _server = fixture.start_server();
    let mut sent = 0;
    for (name, method) in SendMethod::ALL {
        let mut stream = fixture.connect();
        for length in LENGTHS {
            let end = if name == "chunked-file" { "\n\r\n0\r\n\r\n" } else { "x\n" };
            send_and_read(&mut stream, &get_request(&format!("{name}/{length}")), end);
            sent += 1;
            assert_eq!(
                (fixture.totals(), fixture.pod_state().in_flight),
                ((sent, sent), 0),
                "{method:?}"
            );
        }
    }
    fixture.wait_settled_in_sync();
}

/// Sends, receives, accepts, binds and listens by io_uring, with and without a submission thread of the kernel.
#[test]
fn a_server_by_io_uring_is_counted_like_any_other() {
    for polling in ["", "sqpoll"] {
        let fixture = RobustnessFixture::new();
        let mut server = fixture.start_server_process();
        let features = server.expect_step(&format!("uring {ANY_ADDRESS} {polling}"));
        let kernel = KernelVersion::current().expect("it has a version");
        let is_at_least = |major, minor| kernel >= KernelVersion::new(major, minor, 0);
        assert_eq!(features.contains("zerocopy"), is_at_least(6, 0), "{features}");
        assert_eq!(features.contains("listen"), is_at_least(6, 11), "{features}");
        let listener = fixture.kernel.maps.listener(fixture.pod.cookie, SERVING_PORT).unwrap();
        assert_eq!(listener.reachable, 1, "the pod listens");
        let mut sent = 0;
        for method in SEND_METHODS.into_iter().filter(|method| features.contains(method)) {
            let mut stream = fixture.connect();
            for length in LENGTHS {
                send_and_read(&mut stream, &get_request(&format!("{method}/{length}")), "x\n");
                sent += 1;
                let counts = (fixture.totals(), fixture.pod_state().in_flight);
                assert_eq!(counts, ((sent, sent), 0), "{method}, {polling}");
            }
        }
        fixture.wait_settled_in_sync();
    }
}
