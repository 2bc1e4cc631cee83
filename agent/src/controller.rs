//! Shell: the two streams with the controller: routes in, pod reports out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::{
    link::{Changes, Link, PodKey},
    outbox::Outbox,
    wire::PodItem,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// What the route stream has said since the agent last looked.
///
/// The stream never waits for the agent: a subject that changes twice meanwhile is taken in once.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    news: Mutex<Option<News>>,
    came: Notify,
}

/// Changes of the RouteTable, whole as of `version`.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct News {
    /// In force once every change is.
    pub(crate) version: u64,
    /// New state of each subject that changed.
    pub(crate) changes: Changes,
}

impl Routes {
    /// Follows the controller's routes until the link's shutdown.
    pub(crate) async fn follow(&self, link: &Link) {
        link.watch_changes(|version, changes| self.add(version, changes)).await;
    }

    /// Waits for news. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&self) -> News {
        loop {
            if let Some(news) = self.lock().take() {
                return news;
            }
            self.came.notified().await;
        }
    }

    fn add(&self, version: u64, changes: Changes) {
        let mut news = self.lock();
        let waiting = news.get_or_insert_default();
        waiting.version = version;
        waiting.changes.extend(changes);
        drop(news);
        self.came.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Option<News>> {
        // No code that runs under the lock can leave it half changed.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reports pods, once `settled` says that what is reported can be relied on.
pub(crate) async fn report(
    link: Arc<Link>,
    outbox: Outbox<PodKey, PodItem>,
    settled: CancellationToken,
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = settled.cancelled() => link.report_pods(&outbox).await,
        () = shutdown.cancelled() => {}
    }
}

#[cfg(test)]
mod tests {
    use common::wire::{Activator, RouteChange, RouteKey};

    use super::*;

    fn activator(name: &str, node: &str) -> (RouteKey, RouteChange) {
        let it = Activator {
            name: name.into(),
            node: node.into(),
            zone: String::new(),
            addresses: Vec::new(),
        };
        (RouteKey::Activator(name.into()), RouteChange::Activator(it))
    }

    #[tokio::test]
    async fn what_changed_twice_is_taken_in_once() {
        let routes = Routes::default();
        routes.add(1, [activator("a", "n1"), activator("b", "n1")].into());
        routes.add(2, [activator("a", "n2")].into());
        let news = routes.next().await;
        assert_eq!(news.version, 2);
        let want = [activator("a", "n2"), activator("b", "n1")];
        assert_eq!(news.changes, Changes::from(want));
    }

    #[tokio::test]
    async fn a_version_without_changes_is_news() {
        let routes = Arc::new(Routes::default());
        let waiting = tokio::spawn({
            let routes = Arc::clone(&routes);
            async move { routes.next().await }
        });
        tokio::task::yield_now().await;
        routes.add(7, Changes::new());
        assert_eq!(waiting.await.expect("no panic").version, 7);
    }
}
