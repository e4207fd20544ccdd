//! The members: decides from a connection's hello whether it is admitted.

use super::ServerOptions;
use crate::client_note::{ClientNote, ClientNumber, Line};
use crate::events::Event;
use crate::handshake::{Cause, Hello, Refusal, Role};
use crate::process_space::ProcessSpace;
use std::collections::{HashMap, HashSet};

/// The members of the round.
#[derive(Debug)]
pub(super) struct Members {
    round: u32,
    /// The world size and who set it.
    world: Option<(u32, String)>,
    members: HashMap<u32, MemberEntry>,
    /// The newest meeting, from 1; 0 before the first member has joined.
    meeting: u64,
    /// The last meeting of each rank.
    last_meeting: HashMap<u32, u64>,
    /// The refusals (rank and meeting) that the others have been informed of.
    announced: HashSet<(Option<u32>, u64)>,
    /// The number of present members that run in another process than this server.
    num_others: usize,
    host: String,
    pid: u32,
    space: ProcessSpace,
}

#[derive(Debug)]
struct MemberEntry {
    hello: Hello,
    number: ClientNumber,
    /// Whether it runs in another process than this server.
    is_other: bool,
    lost: bool,
}

/// What an admitted connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// One more connection of a member, or of a client that is not a member.
    Further,
    /// A life line that replaces a broken one.
    Resumed,
    /// The life line of a new member, with its meeting and the one that it was in before.
    LifeLine { rank: usize, incarnation: u64, before: Option<u64> },
}

impl Members {
    pub(super) fn new(options: ServerOptions) -> Members {
        let world =
            options.world_size.map(|size| (u32::try_from(size).unwrap_or(u32::MAX), "the store".into()));
        let Hello { host, pid, .. } = Hello::new(Role::Store);
        Members {
            round: options.round,
            world,
            members: HashMap::new(),
            meeting: 0,
            last_meeting: HashMap::new(),
            announced: HashSet::new(),
            num_others: 0,
            host,
            pid,
            space: ProcessSpace::here(),
        }
    }

    /// Admits `hello` with its note, or says why not.
    pub(super) fn admit(&mut self, hello: &Hello, note: ClientNote) -> Result<Entry, Refusal> {
        if hello.role != Role::Store {
            return Err(Refusal::new(Cause::Other, "this is a store, not a link of a group"));
        }
        self.check_round(hello)?;
        self.check_world(hello)?;
        let Some(rank) = hello.rank else { return Ok(Entry::Further) };
        match (self.members.get(&rank), note.line) {
            (Some(member), line) => {
                member.check_same(hello, note.number)?;
                Ok(if line == Line::Calls { Entry::Further } else { Entry::Resumed })
            }
            (None, Line::Life) => Ok(self.join(rank, hello, note)),
            (None, Line::Calls) => Ok(Entry::Further),
            (None, Line::Resumed) => {
                let message = format!(
                    "{hello} wants to resume and is unknown here: the store was restarted, or the rank has left; try restarting the job"
                );
                Err(Refusal::new(Cause::Other, message))
            }
        }
    }

    fn join(&mut self, rank: u32, hello: &Hello, note: ClientNote) -> Entry {
        if self.world.is_none() && hello.world_size > 0 {
            self.world = Some((hello.world_size, hello.to_string()));
        }
        let is_other = self.is_other(hello, note);
        let member = MemberEntry { hello: hello.clone(), number: note.number, is_other, lost: false };
        self.members.insert(rank, member);
        self.num_others += usize::from(is_other);
        self.meeting = self.meeting_of(rank);
        let before = self.last_meeting.insert(rank, self.meeting);
        Entry::LifeLine { rank: rank as usize, incarnation: self.meeting, before }
    }

    /// The meeting that this rank would join now: the newest one, or the next one if it was already in that.
    fn meeting_of(&self, rank: u32) -> u64 {
        match self.last_meeting.get(&rank) {
            Some(last) => self.meeting.max(last + 1),
            None => self.meeting.max(1),
        }
    }

    /// The event that informs the others of a refusal, and its meeting; only if they may wait for that rank, and once.
    pub(super) fn refused(&mut self, hello: Option<&Hello>, refusal: Refusal) -> Option<(u64, Event)> {
        let rank = hello.and_then(|hello| hello.rank);
        let concerns_all = match refusal.cause {
            Cause::Rank | Cause::WorldSize => rank.is_some(),
            Cause::Version => true,
            Cause::Round | Cause::Ending | Cause::Other => false,
        };
        let meeting = match rank {
            Some(rank) if !self.members.contains_key(&rank) => self.meeting_of(rank),
            _ => self.meeting.max(1),
        };
        let is_new = concerns_all && self.announced.insert((rank, meeting));
        let rank = rank.map(|rank| rank as usize);
        is_new.then_some((meeting, Event::Refused { rank, reason: refusal.message }))
    }

    /// Whether `hello` would be a new member.
    pub(super) fn is_new(&self, hello: &Hello, note: ClientNote) -> bool {
        let is_known = |rank: u32| self.members.get(&rank).is_some_and(|member| member.number == note.number);
        note.line == Line::Life && hello.rank.is_some_and(|rank| !is_known(rank))
    }

    fn check_round(&self, hello: &Hello) -> Result<(), Refusal> {
        if hello.round == self.round {
            return Ok(());
        }
        let ours = self.round;
        let theirs = hello.round;
        let message = format!("the store is in round {ours}, {hello} in round {theirs}; try restarting it");
        Err(Refusal::new(Cause::Round, message))
    }

    fn check_world(&self, hello: &Hello) -> Result<(), Refusal> {
        let Some((size, by)) = &self.world else {
            return check_rank(hello, hello.world_size);
        };
        if hello.world_size != 0 && hello.world_size != *size {
            let theirs = hello.world_size;
            let message = format!(
                "world size differs: {size} according to {by}, {theirs} according to {hello}; try the same WORLD_SIZE on all ranks"
            );
            return Err(Refusal::new(Cause::WorldSize, message));
        }
        check_rank(hello, *size)
    }

    /// The member has said goodbye: its rank is free, and the end of its connections is not a loss.
    pub(super) fn leave(&mut self, hello: &Hello, number: ClientNumber) {
        if let Some(rank) = hello.rank
            && self.members.get(&rank).is_some_and(|member| member.number == number && !member.lost)
            && let Some(member) = self.members.remove(&rank)
        {
            self.num_others -= usize::from(member.is_other);
        }
    }

    /// Whether this client is a member that has neither left nor been reported as lost.
    pub(super) fn is_present(&self, hello: &Hello, number: ClientNumber) -> bool {
        let member = hello.rank.and_then(|rank| self.members.get(&rank));
        member.is_some_and(|member| member.number == number && !member.lost)
    }

    /// Reports a member as lost, because its life line ended and was not resumed in time. Returns the event to post,
    /// unless the member has left.
    pub(super) fn lose(&mut self, rank: u32, number: ClientNumber) -> Option<Event> {
        let member = self.members.get_mut(&rank).filter(|member| member.number == number && !member.lost)?;
        member.lost = true;
        let hello = member.hello.clone();
        self.num_others -= usize::from(member.is_other);
        tracing::warn!(member = %hello, "lost a member");
        Some(Event::Lost { rank: rank as usize, host: hello.host, pid: hello.pid })
    }

    /// The number of present members that run in another process than this server.
    pub(super) fn num_others(&self) -> usize {
        self.num_others
    }

    /// Whether the process of a client is visible in our `/proc`. The host name does not say so: another machine or
    /// container may have the same name.
    pub(super) fn can_see_process(&self, note: ClientNote) -> bool {
        self.space.sees(note.space)
    }

    /// Whether `hello`, with its note, comes from another process.
    fn is_other(&self, hello: &Hello, note: ClientNote) -> bool {
        hello.pid != self.pid || hello.host != self.host || note.space != self.space
    }
}

impl MemberEntry {
    /// Further connections of the same member are allowed; another process with its rank is not.
    fn check_same(&self, hello: &Hello, number: ClientNumber) -> Result<(), Refusal> {
        let held = &self.hello;
        let is_same = self.number == number;
        let message = match (self.lost, is_same) {
            (false, true) => return Ok(()),
            (true, true) => format!(
                "{held} was reported as lost, because its connection broke or was silent for too long, and cannot resume in this round; try a new round, or a longer DRUMLINE_HOST_TIMEOUT"
            ),
            (true, false) => {
                format!("{held} was lost in this round and {hello} cannot take its place; try a new round")
            }
            (false, false) => format!(
                "{held} is already a member, {hello} cannot have the same rank; try giving each rank its own RANK"
            ),
        };
        Err(Refusal::new(Cause::Rank, message))
    }
}

fn check_rank(hello: &Hello, world_size: u32) -> Result<(), Refusal> {
    match hello.rank {
        Some(rank) if world_size != 0 && rank >= world_size => {
            let message =
                format!("{hello} is outside the world of {world_size} ranks, 0 to {}", world_size - 1);
            Err(Refusal::new(Cause::Rank, message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize, world_size: usize, note: u8) -> Hello {
        let mut hello = Hello::new(Role::Store).member(rank, world_size).note(&[note]);
        (hello.host, hello.pid) = ("n1".into(), 70 + u32::from(note));
        hello
    }

    fn note(number: u8, line: Line) -> ClientNote {
        let mut note = [number; 25];
        note[16] = line as u8;
        ClientNote { space: ProcessSpace::here(), ..ClientNote::decode(&note).unwrap() }
    }

    impl Members {
        /// Joins with a new life line.
        fn life(&mut self, hello: &Hello) -> Result<Entry, Refusal> {
            self.admit(hello, note(hello.note[0], Line::Life))
        }

        fn bye(&mut self, hello: &Hello) {
            self.leave(hello, note(hello.note[0], Line::Life).number);
        }

        fn end(&mut self, hello: &Hello) -> Option<Event> {
            self.lose(hello.rank.unwrap(), note(hello.note[0], Line::Life).number)
        }
    }

    fn life_line(rank: usize, incarnation: u64, before: Option<u64>) -> Result<Entry, Refusal> {
        Ok(Entry::LifeLine { rank, incarnation, before })
    }

    fn refusal(result: Result<Entry, Refusal>) -> String {
        result.unwrap_err().message
    }

    #[test]
    fn a_member_may_connect_again_another_process_may_not_take_its_rank() {
        let mut members = Members::new(ServerOptions::default());
        assert_eq!(members.life(&hello(1, 4, 1)), life_line(1, 1, None));
        assert_eq!(members.admit(&hello(1, 4, 1), note(1, Line::Calls)), Ok(Entry::Further));
        let reason = refusal(members.life(&hello(1, 4, 2)));
        assert!(
            reason.starts_with("rank 1 (n1, pid 71) is already a member, rank 1 (n1, pid 72) cannot"),
            "{reason}"
        );
        members.bye(&hello(1, 4, 2));
        assert!(members.life(&hello(1, 4, 2)).is_err(), "only the member itself can leave");
        members.bye(&hello(1, 4, 1));
        assert_eq!(members.end(&hello(1, 4, 1)), None, "it has left");
        assert_eq!(members.life(&hello(1, 4, 2)), life_line(1, 2, Some(1)));
    }

    #[test]
    fn a_rank_that_joins_again_begins_the_next_meeting_and_the_others_join_it() {
        let mut members = Members::new(ServerOptions::default());
        for rank in 0..3 {
            assert_eq!(members.life(&hello(rank, 4, 1)), life_line(rank, 1, None));
        }
        for again in [2, 3] {
            members.bye(&hello(1, 4, again - 1));
            assert_eq!(members.life(&hello(1, 4, again)), life_line(1, again.into(), Some(again as u64 - 1)));
        }
        assert_eq!(
            members.life(&hello(3, 4, 1)),
            life_line(3, 3, None),
            "late, but in time for the newest meeting"
        );
        members.bye(&hello(0, 4, 1));
        assert_eq!(members.life(&hello(0, 4, 2)), life_line(0, 3, Some(1)));
    }

    #[test]
    fn a_refusal_is_announced_once_in_the_meeting_it_concerns() {
        let mut members = Members::new(ServerOptions::default());
        members.life(&hello(0, 2, 1)).unwrap();
        members.life(&hello(1, 2, 1)).unwrap();
        let announced = |members: &mut Members, hello: Hello| {
            let refusal = members.life(&hello).unwrap_err();
            let (meeting, event) = members.refused(Some(&hello), refusal)?;
            matches!(event, Event::Refused { rank, .. } if rank == hello.rank.map(|rank| rank as usize))
                .then_some(meeting)
        };
        assert_eq!(announced(&mut members, hello(1, 2, 5)), Some(1), "a duplicate of a present rank");
        assert_eq!(announced(&mut members, hello(1, 2, 6)), None, "already announced");
        members.bye(&hello(0, 2, 1));
        assert_eq!(announced(&mut members, hello(0, 3, 2)), Some(2), "it belongs to the next meeting");
        assert_eq!(
            announced(&mut members, hello(0, 2, 2).round(9)),
            None,
            "no rank waits for one of another round"
        );
        let mut guest = hello(0, 3, 2);
        guest.rank = None;
        assert_eq!(announced(&mut members, guest), None, "no rank waits for a client that is not a member");
        let version = Refusal::new(Cause::Version, "versions differ");
        assert!(matches!(members.refused(None, version), Some((1, Event::Refused { rank: None, .. }))));
    }

    #[test]
    fn a_lost_rank_stays_lost_for_the_round() {
        let mut members = Members::new(ServerOptions::default());
        members.life(&hello(0, 2, 1)).unwrap();
        assert_eq!(members.num_others(), 1);
        assert_eq!(members.end(&hello(0, 2, 1)), Some(Event::Lost { rank: 0, host: "n1".into(), pid: 71 }));
        assert_eq!(members.num_others(), 0);
        assert!(refusal(members.life(&hello(0, 2, 3))).contains("was lost in this round"));
        let resumed = members.admit(&hello(0, 2, 1), note(1, Line::Resumed));
        assert!(refusal(resumed).contains("was reported as lost"));
    }

    #[test]
    fn a_process_is_visible_only_in_its_own_space_whatever_its_host_name() {
        let mut members = Members::new(ServerOptions::default());
        let here = note(1, Line::Life);
        let elsewhere = ClientNote { space: ProcessSpace([7; 8]), ..here };
        assert!(members.can_see_process(here) && !members.can_see_process(elsewhere));
        let mut twin = Hello::new(Role::Store).member(0, 2);
        assert_eq!((&twin.host, twin.pid), (&members.host, members.pid));
        members.admit(&twin, here).unwrap();
        assert_eq!(members.num_others(), 0, "control: this process itself");
        twin.rank = Some(1);
        let elsewhere = ClientNote { space: ProcessSpace([7; 8]), ..note(2, Line::Life) };
        members.admit(&twin, elsewhere).unwrap();
        assert_eq!(members.num_others(), 1, "the same host name and pid in another container");
        members.leave(&twin, elsewhere.number);
        assert_eq!(members.num_others(), 0);
    }

    #[test]
    fn only_its_member_can_resume_a_life_line() {
        let mut members = Members::new(ServerOptions::default());
        let unknown = refusal(members.admit(&hello(0, 2, 1), note(1, Line::Resumed)));
        assert!(unknown.contains("is unknown here"), "{unknown}");
        members.life(&hello(0, 2, 1)).unwrap();
        assert_eq!(members.admit(&hello(0, 2, 1), note(1, Line::Resumed)), Ok(Entry::Resumed));
        let other = refusal(members.admit(&hello(0, 2, 2), note(2, Line::Resumed)));
        assert!(other.contains("is already a member"), "{other}");
    }

    #[test]
    fn both_values_are_in_every_refusal() {
        let mut members = Members::new(ServerOptions { world_size: None, round: 3 });
        let mut one = hello(0, 4, 1).round(3);
        members.life(&one).unwrap();
        let reason = refusal(members.life(&hello(1, 8, 2).round(3)));
        assert!(
            reason.contains("4 according to rank 0 (n1, pid 71), 8 according to rank 1 (n1, pid 72)"),
            "{reason}"
        );
        assert!(
            refusal(members.life(&hello(1, 4, 2))).contains("in round 3, rank 1 (n1, pid 72) in round 0")
        );
        assert!(
            refusal(members.life(&hello(4, 4, 2).round(3))).contains("outside the world of 4 ranks, 0 to 3")
        );
        (one.rank, one.world_size) = (None, 0);
        assert_eq!(members.life(&one), Ok(Entry::Further), "a launcher is not a member");
    }
}
