"""``pdserve up``: a whole cluster on this host, one process per part, and a first answer from it.

run          the order of things: check, start, first chat, stay, stop
settings     what may be asked for, and the mistakes in it
preflight    what must hold before anything starts: ports, cache, memory
plan         which processes with which command lines
child        one process: start it so that it cannot outlive us, end it
supervisor   all of them: start together, watch, restart, stop
health       asks a child whether it is ready
first_chat   one chat through the OpenAI API
timing       draws where the time to the first token went
"""
