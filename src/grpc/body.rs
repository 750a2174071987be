//! Receiving the one message of a request.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::frame::{Message, PREFIX, Prefix, too_long};
use super::fresh;
use super::gzip::Gzip;
use super::sets::TaskSets;
use crate::coordination::{Code, Failure};

/// Memory for requests that are not there in one piece. A purse is shared by those who have a copy of it.
#[derive(Debug, Clone)]
pub(super) struct Purse {
    units: Arc<Semaphore>,
    /// How many there are in all.
    all: u32,
}

/// A purse counts in units of this many bytes.
const UNIT: usize = 1 << 10;

impl Purse {
    pub(super) fn new(bytes: usize) -> Self {
        let all = u32::try_from(bytes / UNIT).unwrap_or(u32::MAX).clamp(1, 1 << 28);
        Self { units: Arc::new(Semaphore::new(all as usize)), all }
    }

    /// Bytes that are taken.
    pub(super) fn taken(&self) -> usize {
        (self.all as usize).saturating_sub(self.units.available_permits()) * UNIT
    }

    fn units(&self, bytes: usize) -> u32 {
        u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.all)
    }

    /// Memory for `bytes`, once there is room. What is larger than all there is waits for all of it.
    async fn take(self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = self.units(bytes);
        self.units.acquire_many_owned(units).await.ok()
    }

    /// Memory for `bytes`, if there is room now.
    fn try_take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.units).try_acquire_many_owned(self.units(bytes)).ok()
    }
}

/// The memory that all connections share: in two purses, so that small bodies need not queue behind large ones.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    small: Purse,
    large: Purse,
}

/// Bodies up to this length are small.
const SMALL: usize = 8 << 20;

impl Budget {
    pub(super) fn new(bytes: usize) -> Self {
        let (small, large) = (Purse::new(bytes / 4), Purse::new(bytes - bytes / 4));
        Self { small, large }
    }

    /// Bytes that are taken.
    pub(super) fn taken(&self) -> usize {
        self.small.taken() + self.large.taken()
    }
}

/// The share of a common purse that one connection may take, unless one message alone needs more.
const SHARE: u32 = 16;

/// A purse that many pay from, and how much of it one of them has taken.
#[derive(Debug)]
struct Account {
    common: Purse,
    own: OnceLock<Purse>,
}

/// A claim on memory, given back when it is dropped.
struct Claim {
    _common: OwnedSemaphorePermit,
    _own: OwnedSemaphorePermit,
}

impl Account {
    fn new(common: &Purse) -> Self {
        Self { common: common.clone(), own: OnceLock::new() }
    }

    fn own(&self) -> &Purse {
        let share = (self.common.all / SHARE) as usize * UNIT;
        self.own.get_or_init(|| Purse::new(share))
    }

    fn try_take(&self, bytes: usize) -> Option<Claim> {
        let own = self.own().try_take(bytes)?;
        Some(Claim { _common: self.common.try_take(bytes)?, _own: own })
    }

    fn take(&self, bytes: usize) -> impl Future<Output = Option<Claim>> + Send + use<> {
        let (own, common) = (self.own().clone(), self.common.clone());
        async move {
            // In this order: what is held of the own purse while waiting keeps nobody else waiting.
            let own = own.take(bytes).await?;
            Some(Claim { _common: common.take(bytes).await?, _own: own })
        }
    }
}

/// What one connection pays from.
#[derive(Debug)]
pub(super) struct Wallet {
    small: Account,
    large: Account,
    /// The longest message.
    message_bytes: usize,
}

impl Wallet {
    pub(super) fn new(budget: &Budget, message_bytes: usize) -> Self {
        let (small, large) = (Account::new(&budget.small), Account::new(&budget.large));
        Self { small, large, message_bytes }
    }

    fn account(&self, bytes: usize) -> &Account {
        if bytes > SMALL { &self.large } else { &self.small }
    }

    /// Memory for `bytes`, once there is room.
    fn take(&self, bytes: usize) -> impl Future<Output = Option<Claim>> + Send + use<> {
        self.account(bytes).take(bytes)
    }

    /// Memory for `bytes`, if there is room now.
    fn try_take(&self, bytes: usize) -> Option<Claim> {
        self.account(bytes).try_take(bytes)
    }
}

/// Messages that inflate to no more than this are inflated by the connection itself.
const INFLATED_INLINE: usize = 1 << 20;

/// Why there is no message: the request is not in order.
type Broken = Failure;

type Work = Pin<Box<dyn Future<Output = Result<Message, Failure>> + Send>>;
type Payment = Pin<Box<dyn Future<Output = Option<Claim>> + Send>>;

enum Stage {
    /// The prefix is not complete.
    Prefix([u8; PREFIX], usize),
    /// A part of the message is there, and waits for memory for the whole.
    Paying(Prefix, Vec<u8>, Payment),
    /// Parts of the message are put together.
    Assembling(Prefix, Vec<u8>, Claim),
    /// The message is there.
    Whole(Prefix, Message, Option<Claim>),
    /// The message is there, inflated.
    Inflated(Message),
    /// The message is being inflated.
    Working(Work),
    /// All is done.
    Done,
}

/// A request's body on its way in.
pub(super) struct Body {
    stage: Stage,
    /// Whether compressed messages are announced.
    compresses: bool,
    /// The peer has sent all of it.
    ended: bool,
    received: usize,
    /// What had been received when progress was last looked for.
    seen: usize,
    /// What was received and is used, and nobody was told of yet.
    used: usize,
}

fn bad(text: impl Into<String>) -> Broken {
    Failure::plain(Code::Internal, text)
}

impl Body {
    pub(super) fn new(compresses: bool) -> Self {
        let stage = Stage::Prefix([0; PREFIX], 0);
        Self { stage, compresses, ended: false, received: 0, seen: 0, used: 0 }
    }

    /// Takes in what has arrived.
    pub(super) fn push(
        &mut self,
        bytes: &[u8],
        ended: bool,
        wallet: &Wallet,
        sets: &TaskSets,
    ) -> Result<(), Broken> {
        self.received += bytes.len();
        self.ended |= ended;
        let Stage::Prefix(prefix, filled) = &mut self.stage else { return self.add(bytes) };
        let rest = prefix.get_mut(*filled..).unwrap_or_default();
        let count = rest.len().min(bytes.len());
        let (head, bytes) = bytes.split_at(count);
        if let Some(rest) = rest.get_mut(..count) {
            rest.copy_from_slice(head);
        }
        *filled += count;
        let (prefix, filled) = (*prefix, *filled);
        self.used += count;
        if filled < PREFIX {
            return Ok(());
        }
        let prefix = Prefix::read(prefix, wallet.message_bytes)?;
        if prefix.compressed && !self.compresses {
            return Err(bad("the message is compressed, but no grpc-encoding says how"));
        }
        if bytes.len() < prefix.length {
            if let Some(claim) = wallet.try_take(prefix.length) {
                return self.assemble(prefix, bytes, claim);
            }
            // What is held back here is not released before it is paid for.
            self.stage = Stage::Paying(prefix, bytes.to_vec(), Box::pin(wallet.take(prefix.length)));
            return Ok(());
        }
        let (message, more) = bytes.split_at(prefix.length);
        self.used += bytes.len();
        let file = if prefix.compressed && ended { Some(Gzip::open(message)?) } else { None };
        self.stage = match file {
            Some(file) if file.length <= INFLATED_INLINE.min(wallet.message_bytes) => {
                Stage::Inflated(match sets.recall(&file) {
                    Some(recalled) => Message::Recalled(recalled),
                    None => Message::new(file.inflate()?),
                })
            }
            _ => {
                let mut whole = fresh::room(message.len()).ok_or_else(no_memory)?;
                whole.extend_from_slice(message);
                Stage::Whole(prefix, Message::new(whole), None)
            }
        };
        if more.is_empty() { Ok(()) } else { Err(too_much()) }
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        if bytes.is_empty() {
            return Ok(());
        }
        match &mut self.stage {
            Stage::Paying(prefix, held, _) if held.len() + bytes.len() <= prefix.length => {
                held.extend_from_slice(bytes);
            }
            Stage::Assembling(prefix, message, _) if message.len() + bytes.len() <= prefix.length => {
                message.extend_from_slice(bytes);
                self.used += bytes.len();
                self.complete();
            }
            _ => return Err(too_much()),
        }
        Ok(())
    }

    /// There is memory for a message of which this is the beginning.
    fn assemble(&mut self, prefix: Prefix, beginning: &[u8], claim: Claim) -> Result<(), Broken> {
        let mut message = fresh::room(prefix.length).ok_or_else(no_memory)?;
        message.extend_from_slice(beginning);
        self.used += beginning.len();
        self.stage = Stage::Assembling(prefix, message, claim);
        self.complete();
        Ok(())
    }

    fn complete(&mut self) {
        if let Stage::Assembling(prefix, message, _) = &self.stage
            && message.len() == prefix.length
            && let Stage::Assembling(prefix, message, claim) = std::mem::replace(&mut self.stage, Stage::Done)
        {
            self.stage = Stage::Whole(prefix, Message::new(message), Some(claim));
        }
    }

    /// Where the next bytes of the message belong, and how many of them at most, once there is memory for them.
    pub(super) fn room(&mut self) -> Option<(&mut Vec<u8>, usize)> {
        match &mut self.stage {
            Stage::Assembling(prefix, message, _) => {
                let room = prefix.length.saturating_sub(message.len());
                Some((message, room))
            }
            _ => None,
        }
    }

    /// Notes that so many bytes were read into the room.
    pub(super) fn filled(&mut self, bytes: usize) {
        self.received += bytes;
        self.used += bytes;
        self.complete();
    }

    /// How much was used since this was last asked: the peer may send as much more.
    pub(super) fn take_used(&mut self) -> usize {
        std::mem::take(&mut self.used)
    }

    /// How much was received that is not used.
    pub(super) fn held(&self) -> usize {
        match &self.stage {
            Stage::Paying(_, held, _) => held.len(),
            _ => 0,
        }
    }

    /// The message, once it is there.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, wallet: &Wallet) -> Poll<Result<Message, Broken>> {
        loop {
            match &mut self.stage {
                Stage::Working(work) => return Poll::Ready(Ok(ready!(work.as_mut().poll(cx))?)),
                Stage::Paying(prefix, held, payment) => {
                    let Some(claim) = ready!(payment.as_mut().poll(cx)) else {
                        return Poll::Ready(Err(no_memory()));
                    };
                    let (prefix, held) = (*prefix, std::mem::take(held));
                    self.assemble(prefix, &held, claim)?;
                }
                _ if !self.ended => return Poll::Pending,
                _ => {
                    if let Some(message) = self.finish(wallet)? {
                        return Poll::Ready(Ok(message));
                    }
                }
            }
        }
    }

    /// The body has ended: gives the message, if it is complete and not yet to be inflated.
    fn finish(&mut self, wallet: &Wallet) -> Result<Option<Message>, Broken> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Whole(prefix, message, claim) if prefix.compressed => {
                self.stage = inflate(message, claim, wallet)?;
                Ok(None)
            }
            Stage::Whole(_, message, _) | Stage::Inflated(message) => Ok(Some(message)),
            Stage::Prefix(_, 0) => Err(bad("the request has no message")),
            Stage::Prefix(..) => Err(bad("the request ends within the prefix of its message")),
            Stage::Assembling(prefix, ..) | Stage::Paying(prefix, ..) => {
                let text =
                    format!("the request ends before the {} bytes of its message are there", prefix.length);
                Err(bad(text))
            }
            Stage::Working(_) | Stage::Done => Err(bad("the request was read already")),
        }
    }

    /// Whether there has been progress worth the name since this was last asked. While the server itself is what
    /// the request waits for, that counts as progress.
    pub(super) fn has_moved(&mut self) -> bool {
        let step = match &self.stage {
            Stage::Paying(..) | Stage::Working(_) => 0,
            Stage::Assembling(prefix, ..) => (prefix.length / 64).max(1),
            _ => 1,
        };
        let moved = self.received - self.seen >= step;
        self.seen = self.received;
        moved
    }
}

fn too_much() -> Broken {
    bad("the request goes on after its message: calls have one message each way")
}

fn no_memory() -> Broken {
    Failure::plain(Code::ResourceExhausted, "there is no memory for the request")
}

/// Inflates a message: at once if it is short, otherwise on a thread of its own when it is its turn.
fn inflate(message: Message, claim: Option<Claim>, wallet: &Wallet) -> Result<Stage, Broken> {
    let file = message.bytes();
    let length = Gzip::open(&file)?.length;
    if length > wallet.message_bytes {
        return Err(too_long(length, wallet.message_bytes));
    }
    if length <= INFLATED_INLINE {
        return Ok(Stage::Inflated(Message::new(Gzip::open(&file)?.inflate()?)));
    }
    let room = wallet.take(length);
    Ok(Stage::Working(Box::pin(async move {
        // The claim on the compressed bytes is given up first: holding one while waiting for
        // another could stop everybody.
        drop(claim);
        let claim = room.await;
        let inflated = tokio::task::spawn_blocking(move || {
            let _claim = claim;
            Gzip::open(&file)?.inflate()
        });
        let inflated = inflated.await;
        let stopped = |_| Failure::plain(Code::Internal, "the inflating thread was stopped");
        inflated.map_err(stopped)?.map(Message::new)
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn memory_is_shared_and_nothing_is_too_large_for_it() {
        let budget = Budget::new(160 << 20);
        let wallets = [(); 2].map(|()| Wallet::new(&budget, 1 << 30));
        let mut cx = Context::from_waker(std::task::Waker::noop());

        let first = wallets[0].take(2 << 20).await.expect("room");
        assert_eq!(budget.taken(), 2 << 20);
        let mut more = Box::pin(wallets[0].take(2 << 20));
        assert!(more.as_mut().poll(&mut cx).is_pending(), "more than its share");
        let other = wallets[1].take(2 << 20).await.expect("others have theirs");
        drop(first);
        drop(more.await.expect("room"));

        let huge = wallets[0].take(1 << 30).await.expect("all there is for large ones");
        let mut waits = Box::pin(wallets[1].take(9 << 20));
        assert!(waits.as_mut().poll(&mut cx).is_pending());
        drop(other);
        drop(wallets[1].take(1).await.expect("small ones do not wait for large ones"));
        drop(huge);
        drop(waits.await.expect("room"));
        assert_eq!(budget.taken(), 0);
    }
}
