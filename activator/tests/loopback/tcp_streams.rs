//! Raw TCP connections in any pieces, and with clients and pods that break off at any point.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{net::Ipv4Addr, time::Duration};

use common::wire::{RevisionEntry, RoutingPhase};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};

use crate::{
    faults::{FaultRng, assert_no_state_left},
    harness::{start_pod_with, wait_until},
    tcp::{ended, greet_and_echo, tcp_fixture, tcp_fixture_with},
};

const MIB: usize = 1 << 20;

/// Pseudo-random bytes, which are the same for each seed.
fn payload(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(10 * MIB).collect()
}

/// Sends the payload of a seed in random pieces, closes the half, and returns true if the other payload comes back.
async fn exchange_payloads(stream: TcpStream, own: u64, other: u64, largest: usize) -> bool {
    let (mut read, mut write) = stream.into_split();
    let send = async {
        let (payload, mut rng, mut sent) = (payload(own), FaultRng(own), 0);
        while sent < payload.len() {
            let piece = (1 + rng.below(largest)).min(payload.len() - sent);
            write.write_all(&payload[sent..sent + piece]).await.unwrap();
            sent += piece;
            if rng.below(8) == 0 {
                tokio::task::yield_now().await;
            }
        }
        write.shutdown().await.unwrap();
    };
    let receive = async {
        let (mut got, mut buffer, mut rng) = (Vec::new(), vec![0; largest], FaultRng(own + 1));
        loop {
            let room = 1 + rng.below(largest);
            match read.read(&mut buffer[..room]).await.unwrap() {
                0 => return got,
                count => got.extend_from_slice(&buffer[..count]),
            }
        }
    };
    let ((), got) = tokio::join!(send, receive);
    got == payload(other)
}

/// Small pieces are copied, large ones pass through pipes of the kernel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_mebibytes_pass_both_ways_unchanged_in_any_pieces() {
    for largest in [3_000, 40_000, MIB] {
        let mut fixture = tcp_fixture().await;
        let (is_same_tx, mut is_same) = mpsc::channel(1);
        let each = move |stream, _| {
            let is_same_tx = is_same_tx.clone();
            async move {
                let is_same = exchange_payloads(stream, 11, 12, largest).await;
                is_same_tx.send(is_same).await.unwrap();
            }
        };
        fixture.add_ready_pod("p", start_pod_with(each).await);
        let client = fixture.connect().await;
        assert!(exchange_payloads(client, 12, 11, largest).await, "to the client, {largest}");
        assert!(is_same.recv().await.unwrap(), "to the pod, {largest}");
        wait_until(|| ended(&fixture, "complete") == 1.0).await;
    }
}

/// Serves a connection, and breaks off at some point.
async fn serve_faultily(mut stream: TcpStream, number: usize) {
    let mut rng = FaultRng(number as u64 + 1);
    if rng.below(2) == 0 {
        stream.set_zero_linger().unwrap();
    }
    let piece = vec![b'x'; 1 + rng.below(100_000)];
    match rng.below(4) {
        0 => {}
        1 => drop(stream.write_all(&piece).await),
        2 => drop(stream.read(&mut [0; 100]).await),
        _ => greet_and_echo(stream).await,
    }
}

/// Connects, and breaks off at some point.
async fn call_faultily(port: u16, number: u64) {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let mut rng = FaultRng(number + 1);
    if rng.below(2) == 0 {
        stream.set_zero_linger().unwrap();
    }
    let piece = vec![b'y'; 1 + rng.below(100_000)];
    let call = async {
        if rng.below(3) > 0 {
            stream.write_all(&piece).await?;
        }
        if rng.below(3) > 0 {
            stream.shutdown().await?;
        }
        stream.read_to_end(&mut Vec::new()).await
    };
    tokio::time::timeout(Duration::from_millis(20), call).await.ok();
}

#[tokio::test]
async fn clients_and_pods_that_break_off_leave_nothing() {
    let limited = |revision: &mut RevisionEntry| revision.container_concurrency = 2;
    let mut fixture = tcp_fixture_with(|_| {}, limited).await;
    let pod = start_pod_with(serve_faultily).await;
    let mut calls = Vec::new();
    for number in 0..300 {
        match number % 50 {
            0 => fixture.add_ready_pod("p", pod),
            30 => fixture.set_pod("p", pod, RoutingPhase::Draining),
            40 => fixture.apply_change(|table| table.pods.clear()),
            _ => {}
        }
        calls.push(tokio::spawn(call_faultily(fixture.port, number)));
        if number % 10 == 9 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    for call in calls {
        call.await.unwrap();
    }
    fixture.add_ready_pod("p", pod);
    assert_no_state_left(&fixture).await;
    let ends = ["complete", "reset", "failed", "cancelled", "cut_off"];
    wait_until(|| ends.iter().map(|end| ended(&fixture, end)).sum::<f64>() == 300.0).await;
    assert_eq!((ended(&fixture, "failed"), ended(&fixture, "cut_off")), (0.0, 0.0));
    assert!(fixture.waiting_totals().0 > 0, "some waited");
}
