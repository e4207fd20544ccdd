//! Who is a member: decides, from what a connection says of itself, whether it may come in.

use super::ServerOptions;
use crate::client_note::{ClientNote, ClientNumber, Line};
use crate::events::Event;
use crate::handshake::{Cause, Hello, Refusal, Role};
use crate::process_space::ProcessSpace;
use std::collections::{HashMap, HashSet};

/// The members of the round.
#[derive(Debug)]
pub(super) struct Roster {
    round: u32,
    /// The world size and who set it.
    world: Option<(u32, String)>,
    members: HashMap<u32, Member>,
    /// The newest meeting, from 1; 0 before anybody has come.
    meeting: u64,
    /// The meeting that each rank was in last.
    was_in: HashMap<u32, u64>,
    /// Of whose refusal, in which meeting, the others have been told.
    told: HashSet<(Option<u32>, u64)>,
    /// Members that are there and live in another process than this server.
    num_others: usize,
    host: String,
    pid: u32,
    space: ProcessSpace,
}

#[derive(Debug)]
struct Member {
    hello: Hello,
    number: ClientNumber,
    /// Whether it lives in another process than this server.
    is_other: bool,
    lost: bool,
}

/// As what a connection comes in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// One more of a member, or of somebody who is none.
    Further,
    /// A life line in place of one that broke.
    Resumed,
    /// The life line of a new member: in which meeting, and in which it was before.
    LifeLine { rank: usize, incarnation: u64, before: Option<u64> },
}

impl Roster {
    pub(super) fn new(options: ServerOptions) -> Roster {
        let world =
            options.world_size.map(|size| (u32::try_from(size).unwrap_or(u32::MAX), "the store".into()));
        let Hello { host, pid, .. } = Hello::new(Role::Store);
        Roster {
            round: options.round,
            world,
            members: HashMap::new(),
            meeting: 0,
            was_in: HashMap::new(),
            told: HashSet::new(),
            num_others: 0,
            host,
            pid,
            space: ProcessSpace::here(),
        }
    }

    /// Lets `hello`, with its note, in or says why not.
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
                    "{hello} wants to resume and is not known here: the store was started again, or the rank has left; try starting the job again"
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
        let member = Member { hello: hello.clone(), number: note.number, is_other, lost: false };
        self.members.insert(rank, member);
        self.num_others += usize::from(is_other);
        self.meeting = self.meeting_of(rank);
        let before = self.was_in.insert(rank, self.meeting);
        Entry::LifeLine { rank: rank as usize, incarnation: self.meeting, before }
    }

    /// The meeting that this rank would come to now: the newest, or if it has been there, the next.
    fn meeting_of(&self, rank: u32) -> u64 {
        match self.was_in.get(&rank) {
            Some(last) => self.meeting.max(last + 1),
            None => self.meeting.max(1),
        }
    }

    /// What to tell the others of a refusal, and in which meeting: only if they may be waiting for that rank, and once.
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
        let news = concerns_all && self.told.insert((rank, meeting));
        let rank = rank.map(|rank| rank as usize);
        news.then_some((meeting, Event::Refused { rank, reason: refusal.message }))
    }

    /// Whether `hello` would be a member that was not there before.
    pub(super) fn is_new(&self, hello: &Hello, note: ClientNote) -> bool {
        let is_there = |rank: u32| self.members.get(&rank).is_some_and(|member| member.number == note.number);
        note.line == Line::Life && hello.rank.is_some_and(|rank| !is_there(rank))
    }

    fn check_round(&self, hello: &Hello) -> Result<(), Refusal> {
        if hello.round == self.round {
            return Ok(());
        }
        let (ours, theirs) = (self.round, hello.round);
        let message =
            format!("the store is in round {ours}, {hello} in round {theirs}; try starting it anew");
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

    /// The member has said goodbye: its rank is free, and the end of its connections is no loss.
    pub(super) fn leave(&mut self, hello: &Hello, number: ClientNumber) {
        if let Some(rank) = hello.rank
            && self.members.get(&rank).is_some_and(|member| member.number == number && !member.lost)
            && let Some(member) = self.members.remove(&rank)
        {
            self.num_others -= usize::from(member.is_other);
        }
    }

    /// Whether this client is a member that has neither left nor been reported as lost.
    pub(super) fn is_there(&self, hello: &Hello, number: ClientNumber) -> bool {
        let member = hello.rank.and_then(|rank| self.members.get(&rank));
        member.is_some_and(|member| member.number == number && !member.lost)
    }

    /// The life line of a member has ended and was not resumed in time; the event to post unless it has left.
    pub(super) fn lose(&mut self, rank: u32, number: ClientNumber) -> Option<Event> {
        let member = self.members.get_mut(&rank).filter(|member| member.number == number && !member.lost)?;
        member.lost = true;
        let hello = member.hello.clone();
        self.num_others -= usize::from(member.is_other);
        tracing::warn!(member = %hello, "lost");
        Some(Event::Lost { rank: rank as usize, host: hello.host, pid: hello.pid })
    }

    /// Number of members that are there and live in another process than this server.
    pub(super) fn num_others(&self) -> usize {
        self.num_others
    }

    /// Whether the process of a client can be seen from here. Its host's name does not say so: another machine, or a
    /// container, may have the same.
    pub(super) fn sees_process(&self, note: ClientNote) -> bool {
        self.space.sees(note.space)
    }

    /// Whether `hello`, with its note, comes from another process.
    fn is_other(&self, hello: &Hello, note: ClientNote) -> bool {
        hello.pid != self.pid || hello.host != self.host || note.space != self.space
    }
}

impl Member {
    /// Further connections of the same member are welcome; another process with its rank is not.
    fn check_same(&self, hello: &Hello, number: ClientNumber) -> Result<(), Refusal> {
        let held = &self.hello;
        let is_same = self.number == number;
        let message = match (self.lost, is_same) {
            (false, true) => return Ok(()),
            (true, true) => format!(
                "{held} was reported as lost, since its connection broke or was silent for too long, and cannot resume in this round; try a new round, or a longer DRUMLINE_HOST_TIMEOUT"
            ),
            (true, false) => {
                format!("{held} was lost in this round and {hello} cannot take its place; try a new round")
            }
            (false, false) => format!(
                "{held} is there already, {hello} cannot be it too; try giving each rank its own RANK"
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

    impl Roster {
        /// Comes with a new life line.
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
    fn the_same_member_may_come_again_another_may_not() {
        let mut roster = Roster::new(ServerOptions::default());
        assert_eq!(roster.life(&hello(1, 4, 1)), life_line(1, 1, None));
        assert_eq!(roster.admit(&hello(1, 4, 1), note(1, Line::Calls)), Ok(Entry::Further));
        let told = refusal(roster.life(&hello(1, 4, 2)));
        assert!(
            told.starts_with("rank 1 (n1, pid 71) is there already, rank 1 (n1, pid 72) cannot"),
            "{told}"
        );
        roster.bye(&hello(1, 4, 2));
        assert!(roster.life(&hello(1, 4, 2)).is_err(), "only the member itself can leave");
        roster.bye(&hello(1, 4, 1));
        assert_eq!(roster.end(&hello(1, 4, 1)), None, "it has left");
        assert_eq!(roster.life(&hello(1, 4, 2)), life_line(1, 2, Some(1)));
    }

    #[test]
    fn whoever_comes_again_begins_the_next_meeting_and_the_others_join_it() {
        let mut roster = Roster::new(ServerOptions::default());
        for rank in 0..3 {
            assert_eq!(roster.life(&hello(rank, 4, 1)), life_line(rank, 1, None));
        }
        for again in [2, 3] {
            roster.bye(&hello(1, 4, again - 1));
            assert_eq!(roster.life(&hello(1, 4, again)), life_line(1, again.into(), Some(again as u64 - 1)));
        }
        assert_eq!(roster.life(&hello(3, 4, 1)), life_line(3, 3, None), "late, and in time for the newest");
        roster.bye(&hello(0, 4, 1));
        assert_eq!(roster.life(&hello(0, 4, 2)), life_line(0, 3, Some(1)));
    }

    #[test]
    fn a_refusal_is_told_once_in_the_meeting_it_concerns() {
        let mut roster = Roster::new(ServerOptions::default());
        roster.life(&hello(0, 2, 1)).unwrap();
        roster.life(&hello(1, 2, 1)).unwrap();
        let told = |roster: &mut Roster, hello: Hello| {
            let refusal = roster.life(&hello).unwrap_err();
            let (meeting, event) = roster.refused(Some(&hello), refusal)?;
            matches!(event, Event::Refused { rank, .. } if rank == hello.rank.map(|rank| rank as usize))
                .then_some(meeting)
        };
        assert_eq!(told(&mut roster, hello(1, 2, 5)), Some(1), "a duplicate of one that is there");
        assert_eq!(told(&mut roster, hello(1, 2, 6)), None, "known");
        roster.bye(&hello(0, 2, 1));
        assert_eq!(told(&mut roster, hello(0, 3, 2)), Some(2), "it came for the next meeting");
        assert_eq!(told(&mut roster, hello(0, 2, 2).round(9)), None, "nobody waits for another round's");
        let mut guest = hello(0, 3, 2);
        guest.rank = None;
        assert_eq!(told(&mut roster, guest), None, "nobody waits for one that is no member");
        let version = Refusal::new(Cause::Version, "versions differ");
        assert!(matches!(roster.refused(None, version), Some((1, Event::Refused { rank: None, .. }))));
    }

    #[test]
    fn a_lost_rank_stays_lost_for_the_round() {
        let mut roster = Roster::new(ServerOptions::default());
        roster.life(&hello(0, 2, 1)).unwrap();
        assert_eq!(roster.num_others(), 1);
        assert_eq!(roster.end(&hello(0, 2, 1)), Some(Event::Lost { rank: 0, host: "n1".into(), pid: 71 }));
        assert_eq!(roster.num_others(), 0);
        assert!(refusal(roster.life(&hello(0, 2, 3))).contains("was lost in this round"));
        let resumed = roster.admit(&hello(0, 2, 1), note(1, Line::Resumed));
        assert!(refusal(resumed).contains("was reported as lost"));
    }

    #[test]
    fn a_process_is_seen_in_its_own_space_whatever_its_host_is_called() {
        let mut roster = Roster::new(ServerOptions::default());
        let here = note(1, Line::Life);
        let elsewhere = ClientNote { space: ProcessSpace([7; 8]), ..here };
        assert!(roster.sees_process(here) && !roster.sees_process(elsewhere));
        let mut twin = Hello::new(Role::Store).member(0, 2);
        assert_eq!((&twin.host, twin.pid), (&roster.host, roster.pid));
        roster.admit(&twin, here).unwrap();
        assert_eq!(roster.num_others(), 0, "control: this very process");
        twin.rank = Some(1);
        let elsewhere = ClientNote { space: ProcessSpace([7; 8]), ..note(2, Line::Life) };
        roster.admit(&twin, elsewhere).unwrap();
        assert_eq!(roster.num_others(), 1, "the same name and number in another container");
        roster.leave(&twin, elsewhere.number);
        assert_eq!(roster.num_others(), 0);
    }

    #[test]
    fn a_life_line_is_resumed_by_its_member_alone() {
        let mut roster = Roster::new(ServerOptions::default());
        let unknown = refusal(roster.admit(&hello(0, 2, 1), note(1, Line::Resumed)));
        assert!(unknown.contains("is not known here"), "{unknown}");
        roster.life(&hello(0, 2, 1)).unwrap();
        assert_eq!(roster.admit(&hello(0, 2, 1), note(1, Line::Resumed)), Ok(Entry::Resumed));
        let other = refusal(roster.admit(&hello(0, 2, 2), note(2, Line::Resumed)));
        assert!(other.contains("is there already"), "{other}");
    }

    #[test]
    fn both_values_are_in_every_refusal() {
        let mut roster = Roster::new(ServerOptions { world_size: None, round: 3 });
        let mut one = hello(0, 4, 1).round(3);
        roster.life(&one).unwrap();
        let told = refusal(roster.life(&hello(1, 8, 2).round(3)));
        assert!(
            told.contains("4 according to rank 0 (n1, pid 71), 8 according to rank 1 (n1, pid 72)"),
            "{told}"
        );
        assert!(refusal(roster.life(&hello(1, 4, 2))).contains("in round 3, rank 1 (n1, pid 72) in round 0"));
        assert!(
            refusal(roster.life(&hello(4, 4, 2).round(3))).contains("outside the world of 4 ranks, 0 to 3")
        );
        (one.rank, one.world_size) = (None, 0);
        assert_eq!(roster.life(&one), Ok(Entry::Further), "a launcher is no member");
    }
}
