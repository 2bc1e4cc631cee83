//! Pods of the local node that end late, or whose service is applied again while they drain.

use super::*;

#[test]
fn a_pod_whose_node_never_reports_its_end_leaves_nothing_behind() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    sim.report_pod_status(&uid, NodePhase::Running, ContainerRunState::Running, 0);
    sim.decide(0);
    sim.report_pod(&uid, |it| it.drained = true);
    assert_eq!((sim.pods.len(), sim.machine.cluster.pods.statuses.len()), (0, 1));
    // The grace period of 300 s, and the time within which a node reports the end.
    sim.advance_time(329_999);
    assert_eq!(sim.app().revisions[0].pods.len(), 1);
    sim.advance_time(1);
    assert_eq!(sim.app().revisions[0].pods, []);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    let pods = &sim.machine.cluster.pods;
    assert_eq!((pods.statuses.len(), pods.reports.len()), (0, 0));
}
