//! Knative's own client.

use tests::cluster::Cluster;

#[test]
fn kn_runs_beside_the_cluster() {
    let said = Cluster::at_hand().run(&["kn", "version"]).unwrap();
    assert!(said.contains("serving.knative.dev/v1"), "{said}");
}
