use std::time::{Duration, Instant};

use common::local_node::{ContainerRunState, PodRunPhase};

use super::*;

fn plan(name: &str, role: ContainerRole) -> ContainerPlan {
    ContainerPlan { name: name.to_owned(), role, is_probed: false }
}

fn exit(code: i32) -> ContainerExit {
    ContainerExit { code, reason: "Error".to_owned(), message: "no config\n".to_owned() }
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Returns a pod with one running container.
fn running(now: Instant) -> PodStateMachine {
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    assert_eq!(pod.step(now, PodEvent::Begin), [PodAction::CreateNetwork, PodAction::Pull(0)]);
    assert_eq!(pod.step(now, PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() }), []);
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), [PodAction::Start(0)]);
    assert_eq!(pod.phase(), PodRunPhase::Pending);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), []);
    assert_eq!(pod.phase(), PodRunPhase::Running);
    pod
}

#[test]
fn restarts_back_off_from_at_once_to_five_minutes_and_forget_after_ten() {
    let mut now = Instant::now();
    let mut pod = running(now);
    for wait in [0, 10, 20, 40, 80, 160, 300, 300] {
        let actions = pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) });
        if wait > 0 {
            assert_eq!(actions, []);
            assert_eq!(pod.next_tick_at(now), Some(now + seconds(wait)));
            assert_eq!(pod.step(now + seconds(wait) - seconds(1), PodEvent::Tick), []);
            now += seconds(wait);
            assert_eq!(pod.step(now, PodEvent::Tick), [PodAction::Start(0)], "after {wait} s");
        } else {
            assert_eq!(actions, [PodAction::Start(0)]);
        }
        pod.step(now, PodEvent::Started { index: 0 });
    }
    assert_eq!(pod.restarts(0), 8);
    now += seconds(601);
    assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) }), [PodAction::Start(0)]);
}

#[test]
fn a_crashing_container_says_why_it_waits() {
    let now = Instant::now();
    let mut pod = running(now);
    pod.step(now, PodEvent::Exited { index: 0, exit: exit(3) });
    let state = ContainerRunState::Waiting {
        reason: "ContainerCreating".to_owned(),
        message: "Error with code 3: no config; started again at once".to_owned(),
        last_exit: Some(3),
    };
    assert_eq!(
        pod.container_statuses()[0].state,
        state,
        "the reason is known while it starts again"
    );
    pod.step(now, PodEvent::Started { index: 0 });
    pod.step(now, PodEvent::Exited { index: 0, exit: exit(3) });
    let state = ContainerRunState::Waiting {
        reason: "CrashLoopBackOff".to_owned(),
        message: "Error with code 3: no config; started again after 10 s".to_owned(),
        last_exit: Some(3),
    };
    assert_eq!(pod.container_statuses()[0].state, state);
    assert_eq!(pod.phase(), PodRunPhase::Running);
}

#[test]
fn a_missing_image_is_asked_for_again_later() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    pod.step(now, PodEvent::NetworkReady(Vec::new()));
    let failed = || PodEvent::ImageFailed {
        index: 0,
        reason: "ImagePullBackOff".to_owned(),
        message: "not found".to_owned(),
    };
    assert_eq!(pod.step(now, failed()), []);
    assert_eq!(pod.next_tick_at(now), Some(now + seconds(10)));
    assert_eq!(pod.step(now + seconds(10), PodEvent::Tick), [PodAction::Pull(0)]);
    pod.step(now + seconds(10), failed());
    assert_eq!(pod.next_tick_at(now + seconds(10)), Some(now + seconds(30)));
    let ready = PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() };
    assert_eq!(pod.step(now + seconds(30), ready), [PodAction::Start(0)]);
    assert_eq!(pod.restarts(0), 0);
}

#[test]
fn a_stopped_pod_is_asked_then_killed_then_removed() {
    let now = Instant::now();
    let mut pod = running(now);
    assert_eq!(pod.step(now, PodEvent::Stop), [PodAction::Terminate(0)]);
    assert_eq!(pod.step(now, PodEvent::Stop), []);
    assert_eq!(
        (pod.phase(), pod.next_tick_at(now)),
        (PodRunPhase::Terminating, Some(now + seconds(30)))
    );
    assert_eq!(pod.step(now + seconds(29), PodEvent::Tick), []);
    assert_eq!(pod.step(now + seconds(30), PodEvent::Tick), [PodAction::Kill(0)]);
    assert_eq!(pod.next_tick_at(now + seconds(30)), None);
    let exited = PodEvent::Exited { index: 0, exit: exit(137) };
    assert_eq!(pod.step(now + seconds(30), exited), [PodAction::Remove]);
    assert_eq!(pod.step(now + seconds(30), PodEvent::Removed), []);
    assert_eq!(pod.phase(), PodRunPhase::Removed);
}

#[test]
fn a_pod_stopped_while_it_starts_leaves_nothing_behind() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    assert_eq!(pod.step(now, PodEvent::Stop), []);
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), []);
    let image = PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() };
    assert_eq!(pod.step(now, image), [PodAction::Remove]);

    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    pod.step(now, PodEvent::NetworkReady(Vec::new()));
    pod.step(now, PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() });
    assert_eq!(pod.step(now, PodEvent::Stop), []);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), [PodAction::Terminate(0)]);
}

#[test]
fn init_containers_run_one_after_another_and_sidecars_stay() {
    let now = Instant::now();
    let mut pod = pod_of_each_role(now);
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), [PodAction::Start(0)]);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), []);
    assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(0) }), [PodAction::Start(1)]);
    assert_eq!(pod.step(now, PodEvent::Started { index: 1 }), [PodAction::Start(2)]);
    pod.step(now, PodEvent::Started { index: 2 });
    assert_eq!(pod.phase(), PodRunPhase::Running);
    assert_eq!(pod.step(now, PodEvent::Stop), [PodAction::Terminate(2)]);
    assert_eq!(
        pod.step(now, PodEvent::Exited { index: 2, exit: exit(0) }),
        [PodAction::Terminate(1)]
    );
    assert_eq!(pod.step(now, PodEvent::Exited { index: 1, exit: exit(0) }), [PodAction::Remove]);
}

/// Returns a pod with an init container, a sidecar and a main container. Their images are ready, and its network is not.
fn pod_of_each_role(now: Instant) -> PodStateMachine {
    let plans = vec![
        plan("first", ContainerRole::Init),
        plan("side", ContainerRole::Sidecar),
        plan("web", ContainerRole::Main),
    ];
    let mut pod = PodStateMachine::new(RestartPolicy::Always, None, plans);
    pod.step(now, PodEvent::Begin);
    for index in 0..3 {
        pod.step(now, PodEvent::ImageReady { index, digest: "sha256:1".to_owned() });
    }
    pod
}

/// Returns a pod with an init container that has ended, and a running sidecar and main container.
fn pod_with_init_container_and_sidecar(now: Instant) -> PodStateMachine {
    let mut pod = pod_of_each_role(now);
    pod.step(now, PodEvent::NetworkReady(Vec::new()));
    for index in 0..3 {
        pod.step(now, PodEvent::Started { index });
        if index == 0 {
            pod.step(now, PodEvent::Exited { index, exit: exit(0) });
        }
    }
    assert_eq!(pod.phase(), PodRunPhase::Running);
    pod
}

#[test]
fn a_main_container_starts_again_while_its_sidecar_waits() {
    let now = Instant::now();
    let mut pod = pod_with_init_container_and_sidecar(now);
    // The first restart of each is immediate, and the second one is after 10 s.
    for (at, index) in [(0, 2), (0, 1), (1, 2), (6, 1)] {
        let actions = pod.step(now + seconds(at), PodEvent::Exited { index, exit: exit(1) });
        if actions == [PodAction::Start(index)] {
            pod.step(now + seconds(at), PodEvent::Started { index });
        }
    }
    assert_eq!(pod.next_tick_at(now + seconds(6)), Some(now + seconds(11)));
    assert_eq!(pod.step(now + seconds(11), PodEvent::Tick), [PodAction::Start(2)]);
    assert_eq!(pod.next_tick_at(now + seconds(11)), Some(now + seconds(16)));
    assert_eq!(pod.step(now + seconds(16), PodEvent::Tick), [PodAction::Start(1)]);
}

#[test]
fn a_pod_whose_image_waits_longer_than_its_network_is_ticked_for_both() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    let failed = |pod: &mut PodStateMachine, at| {
        let (reason, message) = ("ImagePullBackOff".to_owned(), "not found".to_owned());
        pod.step(at, PodEvent::ImageFailed { index: 0, reason, message });
    };
    failed(&mut pod, now);
    pod.step(now + seconds(5), PodEvent::NetworkFailed("no address".to_owned()));
    let mut at = now + seconds(5);
    // The tick of one timer must not be lost to the other's that has passed: each wait ends with a tick.
    for _ in 0..20 {
        at = pod.next_tick_at(at).expect("two timers run");
        for action in pod.step(at, PodEvent::Tick) {
            match action {
                PodAction::Pull(_) => failed(&mut pod, at),
                PodAction::CreateNetwork => {
                    pod.step(at, PodEvent::NetworkFailed("no address".to_owned()));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn init_containers_of_an_adopted_pod_whose_main_container_runs_are_over() {
    let now = Instant::now();
    let plans = vec![plan("first", ContainerRole::Init), plan("web", ContainerRole::Main)];
    let mut pod = PodStateMachine::new(RestartPolicy::Always, None, plans);
    pod.adopt_network(Vec::new());
    pod.adopt_container(0, 0, AdoptedRun::Waiting { last_exit: None });
    pod.adopt_container(1, 0, AdoptedRun::Running(ProbeResults::default()));
    assert_eq!(pod.step(now, PodEvent::Begin), [PodAction::Pull(0), PodAction::Pull(1)]);
    for index in 0..2 {
        let image = PodEvent::ImageReady { index, digest: "sha256:1".to_owned() };
        assert_eq!(pod.step(now, image), [], "no container starts");
    }
}

#[test]
fn an_adopted_container_that_has_ended_stays_ended() {
    let now = Instant::now();
    for restart in [RestartPolicy::Never, RestartPolicy::OnFailure] {
        let mut pod = running(now);
        pod.restart = restart;
        assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(0) }), []);
        let saved = pod.final_exit(0).cloned().expect("it has ended");
        let plans = vec![plan("web", ContainerRole::Main)];
        let mut adopted = PodStateMachine::new(restart, None, plans);
        adopted.adopt_network(Vec::new());
        adopted.adopt_container(0, 0, AdoptedRun::Ended(saved));
        adopted.step(now, PodEvent::Begin);
        let image = PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() };
        assert_eq!(adopted.step(now, image), [], "{restart:?}");
        assert_eq!(adopted.container_statuses()[0].state, pod.container_statuses()[0].state);
    }
}

#[test]
fn a_container_that_ended_between_two_node_processes_starts_again_under_a_new_number() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.adopt_network(Vec::new());
    pod.adopt_container(0, 2, AdoptedRun::Running(ProbeResults::default()));
    pod.step(now, PodEvent::Begin);
    pod.step(now, PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() });
    let missed = PodEvent::Exited { index: 0, exit: exit(-1) };
    assert_eq!((pod.step(now, missed), pod.restarts(0)), (vec![PodAction::Start(0)], 3));
}

#[test]
fn a_restart_counts_that_comes_after_a_restart_of_the_node() {
    let now = Instant::now();
    let mut pod = running(now);
    let exited = || PodEvent::Exited { index: 0, exit: exit(1) };
    assert_eq!(pod.step(now, exited()), [PodAction::Start(0)]);
    assert_eq!(pod.waiting_exit(0), None, "a start that is interrupted has its number");
    pod.step(now, PodEvent::Started { index: 0 });
    assert_eq!((pod.step(now, exited()), pod.restarts(0)), (vec![], 1));
    let (restarts, last_exit) = (pod.restarts(0), pod.waiting_exit(0));
    let mut adopted =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    adopted.adopt_network(Vec::new());
    adopted.adopt_container(0, restarts, AdoptedRun::Waiting { last_exit });
    adopted.step(now, PodEvent::Begin);
    assert_eq!(adopted.waiting_exit(0), Some(1), "also after one more restart of the node");
    let image = PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() };
    assert_eq!((adopted.step(now, image), adopted.restarts(0)), (vec![PodAction::Start(0)], 2));
}

#[test]
fn the_restart_policy_decides_if_a_container_starts_again() {
    let now = Instant::now();
    for (restart, code, restarts) in [
        (RestartPolicy::Always, 0, true),
        (RestartPolicy::OnFailure, 0, false),
        (RestartPolicy::OnFailure, 1, true),
        (RestartPolicy::Never, 1, false),
    ] {
        let mut pod = running(now);
        pod.restart = restart;
        let actions = pod.step(now, PodEvent::Exited { index: 0, exit: exit(code) });
        assert_eq!(!actions.is_empty(), restarts, "{restart:?} {code}");
    }
}

#[test]
fn an_adopted_container_is_not_started_twice() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.adopt_container(0, 2, AdoptedRun::Running(ProbeResults::default()));
    pod.network = PodNetworkState::Ready(Vec::new());
    assert_eq!(pod.step(now, PodEvent::Begin), [PodAction::Pull(0)], "no start");
    assert_eq!((pod.phase(), pod.restarts(0)), (PodRunPhase::Running, 2));
}

fn probed(restarts: u32, started: bool, ready: bool) -> PodEvent {
    PodEvent::ProbesChanged { index: 0, restarts, results: ProbeResults { started, ready } }
}

/// Returns a pod of a probed sidecar and a main container; images and network are ready.
fn pod_with_probed_sidecar(now: Instant) -> PodStateMachine {
    let sidecar = ContainerPlan { is_probed: true, ..plan("proxy", ContainerRole::Sidecar) };
    let mut pod = PodStateMachine::new(
        RestartPolicy::Always,
        None,
        vec![sidecar, plan("web", ContainerRole::Main)],
    );
    pod.step(now, PodEvent::Begin);
    for index in [0, 1] {
        pod.step(now, PodEvent::ImageReady { index, digest: "sha256:1".to_owned() });
    }
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), [PodAction::Start(0)]);
    pod
}

#[test]
fn a_pod_without_probes_is_ready_with_its_processes() {
    let now = Instant::now();
    let mut pod = running(now);
    assert!(pod.is_ready());
    pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) });
    assert!(!pod.is_ready());
}

#[test]
fn what_comes_after_a_sidecar_waits_for_its_startup_probe_and_the_pod_for_its_readiness() {
    let now = Instant::now();
    let mut pod = pod_with_probed_sidecar(now);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), [], "it may not have started yet");
    assert_eq!(pod.step(now, probed(0, true, false)), [PodAction::Start(1)]);
    pod.step(now, PodEvent::Started { index: 1 });
    assert!(!pod.is_ready());
    pod.step(now, probed(0, true, true));
    assert!(pod.is_ready());
    pod.step(now, probed(0, true, false));
    assert!(!pod.is_ready());
    assert_eq!(pod.phase(), PodRunPhase::Running);
}

#[test]
fn probe_results_of_an_earlier_run_are_ignored() {
    let now = Instant::now();
    let mut pod = pod_with_probed_sidecar(now);
    pod.step(now, PodEvent::Started { index: 0 });
    pod.step(now, probed(0, true, true));
    pod.step(now, PodEvent::Started { index: 1 });
    assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) }), [PodAction::Start(0)]);
    pod.step(now, PodEvent::Started { index: 0 });
    pod.step(now, probed(0, true, true));
    assert!(!pod.is_ready(), "reported for the run before");
    pod.step(now, probed(1, true, true));
    assert!(pod.is_ready());
}

#[test]
fn an_adopted_pod_is_as_ready_as_it_was() {
    let now = Instant::now();
    let web = ContainerPlan { is_probed: true, ..plan("web", ContainerRole::Main) };
    let mut pod = PodStateMachine::new(RestartPolicy::Always, None, vec![web]);
    pod.adopt_network(Vec::new());
    pod.adopt_container(0, 2, AdoptedRun::Running(ProbeResults { started: true, ready: true }));
    pod.step(now, PodEvent::Begin);
    assert!(pod.is_ready());
    pod.step(now, PodEvent::Stop);
    assert!(!pod.is_ready(), "a pod that stops gets no requests");
}
