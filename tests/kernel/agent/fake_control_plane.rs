//! Shell: the streams of a controller and an autoscaler, which receive reports and send routes.

use std::sync::mpsc;

use common::{
    link::{receive_items, route_stream},
    outbox::Outbox,
    wire::{
        PodReportItem, RouteChange, RouteKey, UsageItem,
        raw::{self, pods_server, routes_server, usage_server},
    },
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, codegen::tokio_stream::Stream};

/// A controller and an autoscaler that pass on the reports that they receive.
#[derive(Clone)]
pub(super) struct FakeControlPlane {
    pub(super) routes: Outbox<RouteKey, RouteChange>,
    pub(super) reports: mpsc::Sender<PodReportItem>,
    pub(super) usages: mpsc::Sender<UsageItem>,
}

#[tonic::async_trait]
impl routes_server::Routes for FakeControlPlane {
    type WatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<raw::RouteItem, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<raw::Subscriber>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(Box::pin(route_stream(
            self.routes.subscribe(),
            CancellationToken::new(),
            Some,
        ))))
    }
}

#[tonic::async_trait]
impl pods_server::Pods for FakeControlPlane {
    async fn report(
        &self,
        items: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let reports = self.reports.clone();
        receive_items(items.into_inner(), &CancellationToken::new(), |item| {
            drop(reports.send(item))
        })
        .await?;
        Ok(Response::new(raw::Empty {}))
    }
}

#[tonic::async_trait]
impl usage_server::Usage for FakeControlPlane {
    async fn report(
        &self,
        items: Request<Streaming<raw::UsageItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let usages = self.usages.clone();
        receive_items(items.into_inner(), &CancellationToken::new(), |item| {
            drop(usages.send(item))
        })
        .await?;
        Ok(Response::new(raw::Empty {}))
    }
}
